"""Trials need no kernels that MLX compiles on an NVIDIA GPU: a start waited fifteen seconds for those of two trials."""

import io
import re
from typing import Any

import mlx.core as mx
import pytest

from deltatune.ops.gated_delta.trial_case import ShapeClass
from deltatune.ops.gated_delta.trial_case import trial_case as gated_delta_case
from deltatune.ops.kernels.launch import Launch
from deltatune.ops.pointwise import adam, joining, rows, silu, squares, vocabulary_loss, weighted_norms

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
