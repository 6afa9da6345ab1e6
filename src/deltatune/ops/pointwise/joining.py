"""Arrays end to end in one launch: MLX's concatenate copies each by itself, and a step of small ones waits for that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ...machine import backend
from .. import trial
from .pass_launch import Execute, Pass

# Arrays of a launch: each is a step of a recursion in the kernel's text. Metal would have buffers for 15.
MOST = 64


def end_to_end(arrays: Sequence[mx.array], *, execute: Execute | None = None) -> mx.array:
    """The arrays' numbers one after another, [n] fp32; no gradients."""
    kinds = {array.dtype for array in arrays}
    if execute is None:
        if backend.device() != "cuda" or len(arrays) == 1 or len(kinds) > 1 or not _proven(*kinds):
            return mx.concatenate([array.reshape(-1) for array in arrays]).astype(mx.float32)
        execute = Pass.run
    parts = [_joined(arrays[start : start + MOST], execute) for start in range(0, len(arrays), MOST)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _joined(arrays: Sequence[mx.array], execute: Execute) -> mx.array:
    inputs = {f"x{i}": array.reshape(-1) for i, array in enumerate(arrays)}
    total = sum(array.size for array in arrays)
    pairs = ", ".join(f"{name}, (int){name}_shape[0]" for name in inputs)
    return execute(Pass("end_to_end", inputs, {"y": ((total,), mx.float32)}, ("at", "y", pairs), total))[0]


@cache
def _proven(dtype: mx.Dtype, execute: Execute = Pass.run) -> bool:
    def difference() -> float:
        arrays = [mx.arange(start, start + size).astype(dtype) for start, size in ((0, 130), (7, 1), (40, 33))]
        found = end_to_end(arrays, execute=execute)
        return float(mx.abs(found - mx.concatenate(arrays).astype(mx.float32)).max())

    return trial.passes(f"{dtype} end to end", difference, 0.0)
