"""mlx-vlm's rotary embedding of several axes: as a fused kernel and as array operations, for the doctor to compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import mlx.core as mx

Apply = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]


def fused_rotary() -> tuple[Apply, Apply] | str:
    """Functions of q and k [1, heads, 5, 32], fused and plain; or why the fused kernel does not run here."""
    if not mx.metal.is_available():
        return "a Metal kernel; this machine runs none"
    try:
        module = importlib.import_module("mlx_vlm.models.rope_utils")
    except ModuleNotFoundError as error:
        return f"no mlx-vlm with that kernel is installed ({error})"
    rotary = module.MRoPERotaryEmbedding(32, mrope_section=[6, 5, 5])
    if not getattr(rotary, "fused_apply", False):
        return "this mlx-vlm does not use it here"
    positions = mx.broadcast_to(mx.arange(5), (3, 1, 5))

    def apply(fused: bool) -> Apply:
        def call(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            rotary.fused_apply = fused
            return rotary.apply_rotary(q, k, positions)

        return call

    return apply(True), apply(False)
