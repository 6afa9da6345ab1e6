"""Keeps the arrays that a decoding step computes from weights that train, so that no token computes them anew."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Factors:
    """Arrays that are computed from the trainable weights alone, in the order in which a step asks for them.

    A first trace of the step notes them. They are computed once, and are arguments of the traces that follow.

    Args:
        computed: The arrays that the first trace noted, as arguments of this one; None in the first.

    Attributes:
        noted: The arrays of the first trace.
    """

    def __init__(self, computed: Sequence[mx.array] | None = None):
        self.noted: list[mx.array] = []
        self._computed = None if computed is None else iter(computed)

    def kept(self, *arrays: mx.array) -> list[mx.array]:
        """Return the computed arrays in the place of these, or these in the first trace."""
        if self._computed is not None:
            return [next(self._computed) for _ in arrays]
        self.noted += arrays
        return list(arrays)
