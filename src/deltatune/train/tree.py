"""Wraps functions of MLX on trees, scalars and random state, with types."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """Return the (dotted path, array) of every leaf, in order."""
    return tree_flatten(tree)  # type: ignore[return-value]


def seed_iteration(seed: int, iteration: int, rank: int) -> None:
    """Seed MLX from these three numbers, so that dropout depends on nothing else and no random state must be saved."""
    drawn = np.random.SeedSequence([seed % 2**64, iteration, rank]).generate_state(1, np.uint64)
    mx.random.seed(int(drawn[0]))


def number(scalar: mx.array) -> float:
    """Return the value of a scalar array; this waits until it is computed."""
    return float(scalar.item())  # type: ignore[arg-type]
