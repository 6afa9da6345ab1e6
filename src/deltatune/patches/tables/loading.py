"""Experts' matrices without gaps between them, whoever loads the model on CUDA.

mlx-lm cuts gate and up from one array where a file has them so, and MLX's products there take each matrix to begin
where the one before ends: they would multiply with other experts' matrices, in answers as in training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from ..patch import Function, Patch


def without_gaps(weights: Iterable[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
    """The same, laid out anew where one is a part of a larger array; lazily, and no copy where it is not."""
    return [
        (name, mx.contiguous(array) if isinstance(array, mx.array) and array.ndim == 3 else array)
        for name, array in weights
    ]


def _load_weights(upstream: Function) -> Function:
    def load_weights(self: Any, file_or_weights: Any, strict: bool = True) -> Any:
        # A file's arrays lie as they should.
        if not isinstance(file_or_weights, str):
            file_or_weights = without_gaps(file_or_weights)
        return upstream(self, file_or_weights, strict)

    return load_weights


PATCHES = (
    Patch(
        package="mlx",
        versions=">=0.31.2,<0.33",
        module="mlx.nn.layers.base",
        name="Module.load_weights",
        signature="(self, file_or_weights, strict=True)",
        holders=(),
        reason="MLX's products on CUDA multiply with other experts' matrices where these have gaps between them",
        without="A mixture whose files have gate and up in one array computes wrong on this GPU.",
        replacement=_load_weights,
    ),
)
