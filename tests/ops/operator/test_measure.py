"""The measure of error, arrays drawn for a trial, and which implementations of an operator each device gets."""

import io
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.ops.gated_delta.trial_case import ShapeClass
from deltatune.ops.gated_delta.trial_case import trial_case as gated_delta_case
from deltatune.ops.kernels.launch import Launch
from deltatune.ops.operator import measure
from deltatune.ops.operators import GATED_DELTA
from deltatune.ops.pointwise import adam, joining, rows, silu, squares, vocabulary_loss, weighted_norms

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        (mx.array([1.0, 2.5]), mx.array([1.0, 2.0]), 0.25),
        (mx.ones((2, 2)), mx.ones((2, 2)), 0.0),
        (mx.ones((2, 2)) * mx.nan, mx.ones((2, 2)), INFINITE),
        (mx.ones(2) * mx.inf, mx.ones(2), INFINITE),
        (mx.ones(2), mx.array([mx.nan, 1.0]), INFINITE),
        (mx.ones(2), mx.array([1.0, mx.inf]), INFINITE),
        (mx.ones((2, 3)), mx.ones((2, 2)), INFINITE),
        (mx.zeros(3), mx.zeros(3), 0.0),
        (mx.ones(3), mx.zeros(3), INFINITE),
        (mx.array([1.0, 2.0], mx.bfloat16), np.array([1.0, 2.0]), 0.0),
        (mx.zeros((0, 3)), mx.zeros((0, 3)), 0.0),
    ],
)
def test_the_error_is_relative_to_the_largest_element(found, expected, error):
    assert measure.relative_error(found, expected) == error


def test_float64_is_not_rounded():
    assert measure.relative_error(np.array([1.0 + 1e-12]), np.array([1.0])) == pytest.approx(1e-12, rel=1e-3)
    assert measure.relative_norm(np.array([3.0, 4.0 + 1e-12]), np.array([3.0, 4.0])) == pytest.approx(2e-13, rel=1e-2)


def test_the_largest_error_of_several_arrays_counts():
    assert measure.largest_error([mx.ones(2), mx.array([3.0])], [mx.ones(2), mx.array([2.0])]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        measure.largest_error([mx.ones(2)], [])


def test_random_arrays_do_not_use_mlxs_random_state():
    before = mx.random.state[0].tolist()
    one, other = measure.random_arrays([((3, 2), mx.float32), ((4,), mx.bfloat16)])
    assert (one.shape, one.dtype, other.shape, other.dtype) == ((3, 2), mx.float32, (4,), mx.bfloat16)
    assert mx.random.state[0].tolist() == before


@pytest.mark.parametrize("device", ["cpu", "cuda", "metal"])
def test_a_gpu_prefers_the_fused_kernels_and_a_variable_forces_one(device, monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setattr(backend, "device", lambda: device)
    names, why = GATED_DELTA.order()
    assert (names[0], names[-1], why) == ("chunk" if device == "cpu" else "fused", "chunk", f"automatic on {device}")
    for name in ("naive", "chunk", "native"):
        monkeypatch.setenv("DELTATUNE_GATED_DELTA", name)
        assert GATED_DELTA.order() == ((name,), "forced by DELTATUNE_GATED_DELTA")


def test_gpu_kernels_forced_on_a_cpu_are_refused(monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fused")
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    with pytest.raises(UserError, match=r"fused asks for GPU kernels.*is the CPU"):
        GATED_DELTA.order()
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    assert GATED_DELTA.order() == (("fused",), "forced by DELTATUNE_GATED_DELTA")


def test_an_nvidia_gpu_older_than_hopper_gets_chunk(monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(backend.nvidia, "generation", lambda: 89)
    needs = "the fused kernels need an NVIDIA GPU of compute capability 9.0 or more, and this one has 8.9"
    assert GATED_DELTA.order() == (("chunk",), f"automatic on cuda: {needs}")
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fused")
    with pytest.raises(UserError, match=f"GATED_DELTA=fused: {needs}; unset it"):
        GATED_DELTA.order()


# What MLX compiles on such a GPU when it is first computed there.
COMPILED = {"Gather", "GatherAxis", "Scatter", "ScatterAxis", "MaskedScatter", "GatherMM", "DynamicSlice", "Hadamard"}
BF16, FP32 = mx.bfloat16, mx.float32
CASES: dict[str, Any] = {
    "vocabulary": lambda: vocabulary_loss.trial_case(BF16),
    "rows": lambda: rows.trial_case(BF16),
    "joining": lambda: joining.trial_case(BF16),
    "squares": lambda: squares.trial_case(FP32),
    "adam": lambda: adam.trial_case(FP32, FP32),
    "norms": lambda: weighted_norms.trial_case(1024, BF16, BF16, 1e-6),
    "swiglu": lambda: silu._PASSES.trial_case([((2, 48, 8), BF16)] * 2),
}


def compiled_by_mlx(arrays: list[Any]) -> set[str]:
    text = io.StringIO()
    mx.export_to_dot(text, *(array for array in arrays if isinstance(array, mx.array)), x=mx.zeros(1) + 1)
    return COMPILED & set(re.findall(r'label ?= ?"(\w+)', text.getvalue()))


def launched(launch: Launch) -> list[mx.array]:
    return [mx.zeros(*kind) for kind in launch.outputs.values()]


@pytest.mark.parametrize("name", CASES)
def test_neither_the_calls_nor_the_truths_of_trials_have_mlx_compile_kernels(name):
    case = CASES[name]()
    assert not compiled_by_mlx([*case.call(launched), *case.like])
    assert not compiled_by_mlx(list(case.truth()))


def test_case_of_gated_delta_has_mlx_compile_nothing():
    case = gated_delta_case(ShapeClass(2, 4, 16, 16, "bfloat16"))
    assert not compiled_by_mlx(case.call(lambda q, k, v, *_, initial_state, **__: (v, initial_state)))


def test_a_gather_would_be_seen():
    assert compiled_by_mlx([mx.zeros((3, 4))[1], mx.zeros((3, 4))[mx.array([1, 2])]]) == {"Gather"}
