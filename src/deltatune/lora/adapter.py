"""The base class of all adapters: a frozen module, and a trained low-rank update with its scale and dropout.

The factors are fp32 for a base of any dtype, as in mlx-lm: bf16 would round most of AdamW's small updates away, and the
factors take little memory. Names and shapes are mlx-lm's, so that either library loads the other's files.
"""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..upstream import dropout_rate
from .weights import dense_weight, with_weight

# The parameters that an adapter may hold: the low-rank factors and, for DoRA, the magnitudes.
ADAPTER_LEAVES = ("lora_a", "lora_b", "m")


class Adapter(nn.Module):
    """A module around `base`, dense or quantised, that returns base(x) + scale * update(dropout(x)).

    Subclasses define the update, whose inner size is `rank`.
    """

    base_name: ClassVar[str]
    # The dense class that stands for a quantised base after it was fused with `dequantize`.
    dense_class: ClassVar[type[nn.Module]]
    kind: ClassVar[str] = "lora"

    def __init__(self, base: nn.Module, rank: int = 16, scale: float = 2.0, dropout: float = 0.0):
        super().__init__()
        self[self.base_name] = base
        self.dropout = nn.Dropout(p=dropout)
        self.scale = scale
        self.begin(rank)

    @classmethod
    def from_base(cls, base: nn.Module, rank: int = 16, scale: float = 2.0, dropout: float = 0.0) -> Any:
        """Return an adapter around `base` with lora_b = 0, so that its outputs are those of `base`."""
        return cls(base, rank, scale, dropout)

    def begin(self, rank: int) -> None:
        """Set the trained arrays, with an update of zero."""
        raise NotImplementedError

    @property
    def base(self) -> nn.Module:
        """The module that this adapter adapts."""
        return self[self.base_name]

    @property
    def dropout_rate(self) -> float:
        """The share of the update's inputs that training sets to zero."""
        return dropout_rate(self.dropout)

    @property
    def rank(self) -> int:
        """The inner size of the low-rank update."""
        return self["lora_a"].shape[1]

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """Return a module like the base, with the update in its weight.

        A quantised base is quantised again, unless `dequantize` asks for a dense module.
        """
        weight = self.adapted_weight().astype(dense_weight(self.base).dtype)
        return with_weight(self.base, weight, self.dense_class, dequantize)

    def adapted_weight(self) -> mx.array:
        """Return the base's weight with the update added, in fp32 and dense."""
        raise NotImplementedError

    def unfreeze_adapter(self) -> None:
        """Make this adapter's own parameters trainable and freeze the base."""
        self.freeze()
        self.unfreeze(recurse=False, keys=[leaf for leaf in ADAPTER_LEAVES if leaf in self])


def uniform(fan_in: int, shape: tuple[int, ...]) -> mx.array:
    """Draw fp32 values between -1/sqrt(fan_in) and 1/sqrt(fan_in), as mlx-lm initialises lora_a."""
    bound = fan_in**-0.5
    return mx.random.uniform(low=-bound, high=bound, shape=shape)


def row_norms(weight: mx.array) -> mx.array:
    """The Euclidean length [rows] of every row of a weight [rows, columns], in fp32."""
    return mx.linalg.norm(weight.astype(mx.float32), axis=1)


def with_row_norms(weight: mx.array, norms: mx.array) -> mx.array:
    """Rescale every row of a weight [rows, columns] to the length in `norms` [rows], which is DoRA's normalisation."""
    return (norms / row_norms(weight))[:, None] * weight


def norm_of_sum(base_norm: mx.array, inner_product: mx.array, update_norm_squared: mx.array) -> mx.array:
    """The row norms |w + d| from |w|, w.d and |d|^2, so that no matrix of the weight's size is made in a step."""
    return mx.sqrt(mx.maximum(base_norm**2 + 2 * inner_product + update_norm_squared, 0))
