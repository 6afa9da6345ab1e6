"""Pads the factors of adapters to one rank, the only form of mlx-lm's files, and takes these zeros away again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from ..machine.numpy_arrays import as_numpy
from ..ops.functional import arrays_of
from .adapter import Adapter

_FACTORS = ("lora_a", "lora_b")


def rank_of(leaves: Mapping[str, Any]) -> int:
    """Return the rank of an adapter, given its tensors by name."""
    factor = leaves["lora_a"]
    return (factor[0] if isinstance(factor, list) else factor).shape[1]


def with_rank_and_scale(
    path: str, adapter: nn.Module, leaves: dict[str, Any], rank: int, scale: float
) -> dict[str, mx.array]:
    """Return an adapter's tensors, changed so that they give the same update with this rank and scale.

    Raises:
        UserError: The adapter is one of mlx-lm's own classes, and their layout is not known.
    """
    if rank_of(leaves) == rank and adapter.scale == scale:
        return arrays_of(leaves)
    if not isinstance(adapter, Adapter):
        raise UserError(f"{path}: {type(adapter).__name__} has another rank or scale than the rest; give all the same.")
    for name in _FACTORS:
        leaves[name] = _padded(leaves[name], _axis(name, leaves[name]), rank)
    leaves["lora_b"] = leaves["lora_b"] * (adapter.scale / scale)
    return leaves


def without_padding(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors of an adapter, by full path, without the last ranks in which both factors are zero.

    Such a rank adds nothing and gets no gradient. One rank is left in any case.
    """
    cut = dict(tensors)
    for name, a in tensors.items():
        path, _, leaf = name.rpartition(".")
        b = tensors.get(f"{path}.lora_b")
        if leaf != "lora_a" or b is None or a.ndim not in (2, 3) or b.ndim != a.ndim:
            continue
        rank, axis = a.shape[1], _axis("lora_b", b)
        if b.shape[axis] == rank and not mx.any(a[:, -1] != 0) and not mx.any(mx.take(b, rank - 1, axis=axis) != 0):
            used = np.flatnonzero(_is_used(a, 1) | _is_used(b, axis))
            rank = int(used[-1]) + 1 if used.size else 1
            cut[name], cut[f"{path}.lora_b"] = _first(a, 1, rank), _first(b, axis, rank)
    return cut


def fitted(name: str, tensor: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return a factor of a saved adapter with the rank of `shape`, or as it is where more than zeros would be cut off.

    Args:
        name: The path of the tensor.
        tensor: The tensor as it was saved.
        shape: The shape in the model.
    """
    leaf = name.rpartition(".")[2]
    if leaf not in _FACTORS or tensor.ndim != len(shape) or tensor.ndim not in (2, 3):
        return tensor
    axis = _axis(leaf, tensor)
    rank = shape[axis]
    if tensor.shape[axis] <= rank or _is_used(tensor, axis)[rank:].any():
        return tensor
    return _first(tensor, axis, rank)


def _axis(leaf: str, factor: mx.array) -> int:
    """The axis of a factor that is as long as the rank."""
    return 1 if leaf == "lora_a" else 2 if factor.ndim == 3 else 0


def _is_used(factor: mx.array, axis: int) -> np.ndarray:
    """Which ranks of a factor hold a number other than zero."""
    return as_numpy(mx.any(factor != 0, axis=[other for other in range(factor.ndim) if other != axis]))


def _first(factor: mx.array, axis: int, rank: int) -> mx.array:
    return mx.contiguous(mx.take(factor, mx.arange(rank), axis=axis))


def _padded(factor: mx.array, axis: int, rank: int) -> mx.array:
    widths = [(0, 0)] * factor.ndim
    widths[axis] = (0, rank - factor.shape[axis])
    return mx.pad(factor, widths)
