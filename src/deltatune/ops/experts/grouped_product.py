"""The operands of a product of rows with their experts' matrices, for grouped.py and grouped_hopper.py."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


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
    weight: mx.array
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
        inputs = {"rows": self.rows, "weight": self.weight, "ends": self.ends, "scale": scale}
        return inputs if self.onto is None else inputs | {"onto": self.onto}

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes that a kernel reads: the inputs and the outputs of a matrix, and the number of experts."""
        return "rows_shape[1]", f"weight_shape[{1 if self.transpose else 2}]", "ends_shape[0]"
