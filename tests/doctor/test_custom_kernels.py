"""The sweep finds every custom kernel of a training forward, and whether the backward pass reaches it."""

import importlib.util

import mlx.core as mx
import mlx.nn as nn
import pytest

import other_towers
from deltatune.doctor import custom_kernels, custom_kernels_trace
from deltatune.doctor.custom_kernels import ReachedKernel, sweep, without_gradient
from deltatune.errors import UserError

with_mlx_vlm = pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed")


@pytest.fixture
def found(monkeypatch):
    kept: dict = {}
    monkeypatch.setattr(custom_kernels_trace, "_found", kept)
    return kept


def run_kernel(x: mx.array) -> mx.array:
    kernel = custom_kernels_trace._stand_in(name="twice", input_names=["x"], output_names=["y"], source="")
    return kernel(inputs=[x, 3], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(1, 1, 1))[0]


def test_a_kernel_that_backward_arrives_at_has_no_gradient(found):
    mx.grad(lambda x: run_kernel(x * 2).sum())(mx.ones(4))
    assert list(found.values()) == [[1, True]]
    ((name, caller),) = found
    assert name == "twice"
    assert caller.endswith("run_kernel")


def test_a_kernel_inside_a_custom_function_has_its_gradient(found):
    @mx.custom_function
    def whole(x: mx.array) -> mx.array:
        return run_kernel(x)

    @whole.vjp
    def backward(primal, cotangent, _):
        return cotangent * 2

    mx.grad(lambda x: whole(x * 2).sum())(mx.ones(4))
    assert list(found.values()) == [[1, False]]


def test_a_kernel_that_nothing_trains_through_needs_none(found):
    mx.grad(lambda x: (mx.stop_gradient(run_kernel(x)) * x).sum())(mx.ones(4))
    assert list(found.values()) == [[1, False]]


def test_the_sentence_names_layer_and_kernel():
    kernels = [ReachedKernel("sparse", "m.attention", 2, False), ReachedKernel("fine", "m.rope", 2, True)]
    assert without_gradient(kernels) == [
        "this layer cannot be trained: m.attention runs the kernel sparse, which has no gradient"
    ]
    assert "NO gradient" in str(kernels[0])


@with_mlx_vlm
def test_the_kimi_towers_table_of_positions_has_no_gradient():
    model = other_towers.build("kimi_vl")
    model.set_dtype(mx.bfloat16)
    assert without_gradient(sweep(model)) == [
        "this layer cannot be trained: mlx_vlm.models.kernels.bicubic_interpolate runs the kernel "
        "bicubic_interpolation_antialias, which has no gradient"
    ]


@with_mlx_vlm
def test_refused_backward_of_upstream_is_one_message():
    with pytest.raises(UserError, match=r"glm5_next: this layer cannot be trained: .* VJP with respect to indices"):
        sweep(other_towers.build("glm5_next"))


def test_a_trace_that_does_not_end_is_one_message(monkeypatch):
    monkeypatch.setattr(custom_kernels, "_LIMIT", 0.01)
    with pytest.raises(UserError, match=r"its training forward was not traced within 0.01 seconds"):
        sweep(other_towers.build("glm5_next"))


def test_a_model_that_keeps_no_config_is_refused():
    with pytest.raises(UserError, match="keeps no config"):
        sweep(nn.Linear(2, 2))
