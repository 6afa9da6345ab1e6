"""The arguments of a call of gated_delta or linear_attention that decide which implementation can serve it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...machine import backend
from ..operator.timing import length_class
from .trial_case import BATCH, ShapeClass


@dataclass(frozen=True)
class Call:
    """The arguments of a call that decide which implementation can serve it; without beta, of linear attention."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    masked: bool
    segmented: bool
    beta_dtype: mx.Dtype | None = mx.float32

    @property
    def erases(self) -> bool:
        """Whether the call is one of gated_delta."""
        return self.beta_dtype is not None

    def shape_class(self, tiling: str = "", beta: mx.Dtype = mx.float32, *, timed: bool | None = None) -> ShapeClass:
        """Return the class of calls that share a verdict; `tiling` and `beta` tell kernels of equal shapes apart.

        Where implementations are `timed`, by default on MLX's device, calls of other lengths and of one row are apart.
        """
        heads = (self.k.shape[2], self.v.shape[2], self.k.shape[3], self.v.shape[3])
        dtype = str(self.v.dtype).removeprefix("mlx.core.")
        options = self.masked, self.segmented, self.log_g.ndim == 4
        rates = str(beta).removeprefix("mlx.core.") if self.erases else ""
        rows, tokens = self.k.shape[:2]
        timed = backend.compares_times() if timed is None else timed
        of_times = (length_class(tokens), rows == 1) if timed else ()
        return ShapeClass(*heads, dtype, *options, tiling, rates, *of_times)

    @staticmethod
    def of_class(shape: ShapeClass) -> Call:
        """Return a call of a class, with one token in each row."""
        dtype = getattr(mx, shape.dtype)
        q = mx.zeros((BATCH, 1, shape.key_heads, shape.key_size), dtype)
        v = mx.zeros((BATCH, 1, shape.value_heads, shape.value_size), dtype)
        gates = (*v.shape[:3], shape.key_size) if shape.per_channel else v.shape[:3]
        beta = mx.float32 if shape.erases else None
        return Call(q, q, v, mx.zeros(gates), shape.masked, shape.segmented, beta)

    @property
    def words(self) -> str:
        """The class of the call, in words that are the same on every machine."""
        return str(self.shape_class(timed=True))
