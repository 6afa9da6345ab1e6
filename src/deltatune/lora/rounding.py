"""Measures the error of quantising merged weights again, as a merge into a quantised model does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .adapter import Adapter
from .weights import dense_weight


@dataclass
class Rounding:
    """How far matrices that were quantised again are from the exact merged ones, in shares of Euclidean norms over all
    entries; `errors` has the share of each merged matrix by the path of its module.
    """

    errors: dict[str, float] = field(default_factory=dict)
    # The sums of squares over all matrices: of their rounding errors, of the adapters' updates, and of their entries.
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, path: str, adapter: Adapter, fused: nn.Module) -> None:
        """Measure one matrix: `fused` is the result of `adapter.fuse()`. This waits until it is computed."""
        exact = adapter.adapted_weight()
        base = dense_weight(adapter.base).astype(mx.float32)
        parts = [dense_weight(fused).astype(mx.float32) - exact, exact - base, exact]
        squares: Any = mx.stack([mx.square(part).sum() for part in parts]).tolist()
        self.errors[path] = math.sqrt(squares[0] / squares[2]) if squares[2] else 0.0
        self._squares = [total + square for total, square in zip(self._squares, squares, strict=True)]

    @property
    def error(self) -> float:
        """The share of all merged matrices together that quantising them changed."""
        return math.sqrt(self._squares[0] / self._squares[2]) if self._squares[2] else 0.0

    @property
    def update(self) -> float:
        """The share of all merged matrices together that the adapters' updates make up."""
        return math.sqrt(self._squares[1] / self._squares[2]) if self._squares[2] else 0.0

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda path: self.errors[path])
        return (
            f"Quantising the {len(self.errors):,} merged matrices again changed them by {self.error:.2%} of their "
            f"norm, at most by {self.errors[worst]:.2%} ({worst}); the adapter had changed them by {self.update:.2%}. "
            "--dequantize writes them as they are."
        )
