"""Copies experts' matrices so that there are no gaps between them, whenever weights are loaded on CUDA.

Where a file holds gate and up in one array, mlx-lm slices them, so there are gaps between one expert's matrix and the
next. MLX's products on CUDA ignore the gaps and would multiply with other experts' matrices, in training and inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..patch_record import ALWAYS, Function, Patch
from ..small_cases import describe_difference, drawn


def without_gaps(weights: Iterable[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
    """Copy every array of three dimensions that is a slice of a larger one, lazily. Other arrays are not copied.

    Args:
        weights: Pairs of name and array.

    Returns:
        The pairs, with such arrays replaced by contiguous copies.
    """
    return [
        (name, mx.contiguous(array) if isinstance(array, mx.array) and array.ndim == 3 else array)
        for name, array in weights
    ]


def _load_weights(upstream: Function) -> Function:
    def load_weights(self: Any, file_or_weights: Any, strict: bool = True) -> Any:
        # Arrays that MLX reads from a file itself have no gaps.
        if not isinstance(file_or_weights, str):
            file_or_weights = without_gaps(file_or_weights)
        return upstream(self, file_or_weights, strict)

    return load_weights


def _loads_alike(upstream: Function, ours: Function) -> str | None:
    """Load the halves of an array into a layer through both."""
    weights = drawn(0, 2, 4, 6)
    layers = nn.Module(), nn.Module()
    for layer, load in zip(layers, (upstream, ours), strict=True):
        layer.weight = mx.zeros((2, 2, 6))
        load(layer, [("weight", weights[:, :2])])
    return describe_difference([layers[0].weight], [layers[1].weight], 1e-6, "the weights that were given")


PATCHES = (
    Patch(
        module="mlx.nn.layers.base",
        name="Module.load_weights",
        reason="MLX's products on CUDA multiply with other experts' matrices if there are gaps between them",
        without="Mixtures of experts whose files hold gate and up in one array then compute wrong results on this GPU.",
        needed_for=ALWAYS,
        replacement=_load_weights,
        check=_loads_alike,
    ),
)
