"""Gives `deltatune doctor` the two forms of mlx-vlm's rotary embedding of several axes, to compare them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import mlx.core as mx

from ...machine import backend

Apply = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]


def fused_rotary() -> tuple[Apply, Apply] | str:
    """Build the rotary embedding as mlx-vlm's fused kernel and as array operations.

    Returns:
        Two functions of q and k [1, heads, 5, 32] that return both rotated, the fused one first; or a sentence that
        says why the fused kernel does not run on this machine.
    """
    if backend.device() != "metal":
        return "it is a Metal kernel, and MLX does not compute on Metal here"
    try:
        module = importlib.import_module("mlx_vlm.models.rope_utils")
    except ModuleNotFoundError as error:
        return f"no version of mlx-vlm with this kernel is installed ({error})"
    rotary = module.MRoPERotaryEmbedding(32, mrope_section=[6, 5, 5])
    if not getattr(rotary, "fused_apply", False):
        return "the installed mlx-vlm does not use it on this machine"
    positions = mx.broadcast_to(mx.arange(5), (3, 1, 5))

    def apply(fused: bool) -> Apply:
        def call(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            rotary.fused_apply = fused
            return rotary.apply_rotary(q, k, positions)

        return call

    return apply(True), apply(False)
