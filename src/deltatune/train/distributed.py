"""Data-parallel training over mx.distributed: each rank its own rows, sums over all, rank 0 writes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_map


class World:
    """The ranks of a run. Without a launcher there is one, and every method gives back what it got."""

    def __init__(self) -> None:
        self.group = mx.distributed.init()
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()

    @property
    def main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sums of a few Python numbers over the ranks, in fp32; the same on every rank."""
        if self.size == 1:
            return list(numbers)
        total = mx.distributed.all_sum(mx.array(numbers, mx.float32), group=self.group, stream=mx.cpu)
        return [float(number) for number in total.tolist()]  # type: ignore[union-attr, arg-type]

    def sum_tree(self, tree: Any) -> Any:
        """Sums of every leaf over the ranks; may be traced."""
        if self.size == 1:
            return tree
        mean = mlx.nn.average_gradients(tree, group=self.group)
        return tree_map(lambda leaf: leaf * self.size, mean)

    def gather(self, array: mx.array) -> mx.array:
        """`array` of every rank, stacked in rank order along a new first axis."""
        if self.size == 1:
            return array[None]
        gathered = mx.distributed.all_gather(array[None], group=self.group, stream=mx.cpu)
        # At once, and on every rank: a rank that never looks at it would leave the others waiting.
        mx.eval(gathered)
        return gathered

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum_numbers(0.0)
