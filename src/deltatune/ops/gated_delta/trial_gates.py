"""Gates of every kind, for trials of an implementation: an error that one kind alone shows must show in every trial."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# A trial has a row with this many slow gates, one after another, so that their errors add up: in bf16 a gate of 0.999
# becomes 1, which is 0.1 % off after one token and 67 % after 512.
SLOW_TOKENS = 512
# The logarithms of slow gates.
SLOW = (-1e-3, -1e-5)


def draw_log_gates(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the logarithms of gates, [B, T, Hv] or [B, T, Hv, Dk].

    The gates of the last row are slow. Of the others 2 % are 0, 3 % nearly 0 and 25 % 1, and the rest are usual.
    """
    kind = draw.uniform(size=shape)
    usual = -np.exp(1.5 * draw.normal(size=shape) - 2.0)
    log_g = np.select([kind < 0.02, kind < 0.05, kind < 0.3], [-np.inf, np.log(1e-12), 0.0], usual)
    log_g[-1] = np.where(kind[-1] < 0.5, *SLOW)
    return log_g


def draw_segments(draw: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Draw segments, [B, T] int32: many in all rows but the last, whose second one has its last SLOW_TOKENS tokens."""
    starts = draw.uniform(size=(batch, length)) < 0.03
    starts[-1] = np.arange(length) == length - SLOW_TOKENS
    return np.cumsum(starts, axis=1).astype(np.int32)


def errors_by_gates(
    name: str, error: Callable[[np.ndarray, np.ndarray], float], found: np.ndarray, expected: np.ndarray
) -> dict[str, float]:
    """Return the largest `error` of a result over the rows of usual gates, and its error in the row of slow gates.

    Each row is compared by itself: the large results of slow gates would hide errors of the others.
    """
    if found.shape != expected.shape:
        return {name: float("inf")}
    *usual, slow = (error(one, other) for one, other in zip(found, expected, strict=True))
    return {name: max(usual, default=0.0), slow_name(name): slow}


def slow_name(name: str) -> str:
    """Return the name of a result in the row of slow gates."""
    return f"{name} of slow gates"
