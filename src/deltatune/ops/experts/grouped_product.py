"""The operands of a product of rows with their experts' matrices, for grouped.py and grouped_hopper.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from ..products.quantized_product import unpacked


class Packed(NamedTuple):
    """The experts' matrices in 4 bits, as mx.quantize packs them in mode "affine", for Hopper's kernel alone.

    Attributes:
        words: [E, ..., columns / 8] uint32.
        scales: [E, ..., columns / group_size].
        biases: The same.
        group_size: How many numbers of a row share a scale and a bias.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unpacked matrices."""
        return *self.words.shape[:-1], self.words.shape[-1] * 8

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the unpacked matrices."""
        return self.scales.dtype

    def unpacked(self) -> mx.array:
        """Return the matrices."""
        stored: dict[str, Any] = {"group_size": self.group_size, "bits": 4, "mode": "affine"}
        return unpacked(self.words, self.scales, self.biases, **stored)


class GroupedProduct(NamedTuple):
    """onto + scale * (rows times their expert's matrix + the product of an adapter), [R, N].

    Attributes:
        rows: [R, K], sorted by expert.
        weight: [E, N, K] if `transpose`, and else [E, K, N], of the rows' dtype.
        ends: [E] int32, for each expert the index after its last row.
        transpose: Whether the matrices are multiplied by their last axis.
        scale: One fp32 number.
        onto: [R, N] of the rows' dtype, or None.
        adapter: Rows [R, r] and a factor [E, N, r] if `transpose`, and else [E, r, N], for Hopper's kernel alone.
    """

    rows: mx.array
    weight: mx.array | Packed
    ends: mx.array
    transpose: bool
    scale: mx.array | float = 1.0
    onto: mx.array | None = None
    adapter: tuple[mx.array, mx.array] | None = None

    @property
    def outputs(self) -> int:
        """The width N of the product."""
        return self.weight.shape[1 if self.transpose else 2]

    def arrays(self, scale: mx.array) -> dict[str, mx.array]:
        """Return the inputs that both kernels have, by name; `scale` is the scale as an array [1]."""
        inputs = {"rows": self.rows, "ends": self.ends, "scale": scale}
        if isinstance(self.weight, Packed):
            inputs |= {"weight": self.weight.words, "scales": self.weight.scales, "biases": self.weight.biases}
        else:
            inputs["weight"] = self.weight
        return inputs if self.onto is None else inputs | {"onto": self.onto}

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes that a kernel reads: the inputs and the outputs of a matrix, and the number of experts."""
        outputs = "weight_shape[1]" if self.transpose else "weight_shape[2]"
        if isinstance(self.weight, Packed) and not self.transpose:
            outputs += " * 8"
        return "rows_shape[1]", outputs, "ends_shape[0]"
