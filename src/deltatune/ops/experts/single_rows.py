"""Gives an array the strides with which MLX's sorted products read rows correctly on a GPU."""

from __future__ import annotations

import mlx.core as mx

from ...machine import backend


def single_rows(x: mx.array) -> mx.array:
    """Return x [..., 1, K] with row-major strides; it is copied only if its rows do not follow one another in memory.

    MLX's products on CUDA, and older ones on Metal, use the stride of the axis of size 1 as the distance between
    rows. That stride means nothing: expand_dims makes it 1, a broadcast makes it 0, and arithmetic keeps either.
    """
    return mx.unflatten(x.reshape(-1), 0, x.shape)


def needs_whole_matrices() -> bool:
    """Whether MLX's products take each expert's matrix to follow the one before, as on CUDA.

    The slices of a larger array do not; they are to be copied.
    """
    return backend.device() == "cuda"
