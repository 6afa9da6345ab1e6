"""MLX's trees, with types."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """(dotted path, array) of every leaf, in order."""
    return tree_flatten(tree)  # type: ignore[return-value]


def number(scalar: mx.array) -> float:
    """A scalar array's value; waits for it."""
    return float(scalar.item())  # type: ignore[arg-type]
