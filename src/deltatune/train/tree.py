"""MLX's trees and random state, with types."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """(dotted path, array) of every leaf, in order."""
    return tree_flatten(tree)  # type: ignore[return-value]


def random_key() -> mx.array:
    """The key in MLX's random state."""
    state: Any = mx.random.state
    return state[0]


def set_random_key(key: mx.array) -> None:
    """Continue MLX's random stream from `key`."""
    high, low = key.tolist()  # type: ignore[misc]
    # A key is its seed's two halves (mlx/random.cpp, key); the state itself cannot be assigned.
    mx.random.seed(int(high) << 32 | int(low))  # type: ignore[arg-type]


def seed_iteration(seed: int, iteration: int, rank: int) -> None:
    """Let dropout of an iteration depend on these three numbers alone, so that no random state has to be saved."""
    drawn = np.random.SeedSequence([seed % 2**64, iteration, rank]).generate_state(1, np.uint64)
    mx.random.seed(int(drawn[0]))


def number(scalar: mx.array) -> float:
    """A scalar array's value; waits for it."""
    return float(scalar.item())  # type: ignore[arg-type]
