"""Norms and layers are replaced on NVIDIA GPUs only; calls beyond the kernels stay upstream's."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune import patches
from deltatune.machine import backend
from deltatune.ops.operator import first_use
from deltatune.patches import patched
from deltatune.patches.tables import residual_norms
from deltatune.patches.whole_rows import whole_rows


@pytest.fixture
def calls(monkeypatch):
    """The norms that deltatune computes, with MLX's operations in the kernels' place; the device passes for a GPU."""
    names = []

    def alone(x, weight, eps):
        names.append("alone")
        return mx.fast.rms_norm(x, weight, eps)

    def branch(x, weight, eps):
        names.append("branch")
        return [x, mx.fast.rms_norm(x, weight, eps)]

    def of_sum(x, other, weight, eps):
        names.append("sum")
        return [x + other, mx.fast.rms_norm(x + other, weight, eps)]

    for name, plain in (("weighted_norm", alone), ("branch_norm", branch), ("sum_norm", of_sum)):
        monkeypatch.setattr(residual_norms, name, plain)
    monkeypatch.setattr(residual_norms, "serves", lambda x, weight, eps: True)
    monkeypatch.setattr(patches, "_of_device", lambda: residual_norms.PATCHES)
    return names


def layer_of(tiny_model, family):
    """A tiny model's first layer, which mixes tokens by the recurrence, and an input."""
    layer = tiny_model(family).layers[0]
    return layer, mx.random.normal((2, 5, layer.input_layernorm.weight.shape[0]), key=mx.random.key(1))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "qwen3_5_moe", "bailing"])
def test_a_layer_is_the_same_with_its_sums_in_the_norms(tiny_model, calls, family):
    layer, x = layer_of(tiny_model, family)
    wanted = layer(x)
    with patched() as report, whole_rows():
        assert not report.left_alone
        found = layer(x)
    assert [name for name in calls if name != "alone"] == ["branch", "sum"]
    assert mx.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_another_norm_or_dtype_keeps_the_layer(tiny_model, calls):
    layer, x = layer_of(tiny_model, "qwen3_5")
    mixer = type(layer.linear_attn)

    class Wide(mixer):
        def __call__(self, *arguments):
            return super().__call__(*arguments).astype(mx.float16)

    def same(found, wanted):
        # Other patches change the last bits of what the mixer rounds to fp16.
        return mx.allclose(found, wanted, rtol=2.0**-10, atol=2.0**-10)

    class Norm(nn.RMSNorm):
        pass

    layer.linear_attn.__class__ = Wide
    wanted = layer(x)
    with patched(), whole_rows():
        assert same(layer(x), wanted)
    assert calls == ["branch", "alone"]
    calls.clear()
    layer.input_layernorm.__class__ = Norm
    with patched(), whole_rows():
        assert same(layer(x), wanted)
    assert "sum" not in calls
    assert "branch" not in calls


@pytest.mark.skipif(backend.device() == "cuda", reason="other machines only")
def test_other_machines_keep_upstreams():
    upstream = nn.RMSNorm.__call__
    assert not set(residual_norms.PATCHES) & set(patches._of_device())
    with patched():
        # An Apple GPU has another one in its place (kept_inputs.py).
        assert (nn.RMSNorm.__call__ is upstream) == (backend.device() == "cpu")


def test_few_elements_stay_upstreams(monkeypatch):
    """A decoder's single token is below the least size, and the bits of its norm are MLX's."""
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(first_use, "is_right", lambda *_, **__: True)
    norm = nn.RMSNorm(64)
    x = mx.random.normal((1, 1, 64), key=mx.random.key(0))
    monkeypatch.setattr(patches, "_of_device", lambda: residual_norms.PATCHES)
    wanted = norm(x)
    with patched():
        assert mx.array_equal(norm(x), wanted)
