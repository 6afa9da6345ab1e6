"""MLX's trees, with types."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """(dotted path, array) of every leaf, in order."""
    return tree_flatten(tree)  # type: ignore[return-value]


def seed_iteration(seed: int, iteration: int, rank: int) -> None:
    """Let dropout of an iteration depend on these three numbers alone, so that no random state has to be saved."""
    drawn = np.random.SeedSequence([seed % 2**64, iteration, rank]).generate_state(1, np.uint64)
    mx.random.seed(int(drawn[0]))


def number(scalar: mx.array) -> float:
    """A scalar array's value; waits for it."""
    return float(scalar.item())  # type: ignore[arg-type]
