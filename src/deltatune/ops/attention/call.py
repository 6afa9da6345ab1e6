"""The arguments of a call of attention, which decide which implementation can serve it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .trial_case import LENGTHS, KernelShape


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call of `attention`, which decide which implementation can serve it."""

    q: mx.array
    k: mx.array
    v: mx.array
    causal: bool
    segments: mx.array | None
    window: int | None
    sinks: mx.array | None
    mask: mx.array | None
    scale: float

    def shape_class(self, machine: str) -> KernelShape:
        """Return the class of calls that share a verdict on the kernels of `machine`."""
        dtype = str(self.q.dtype).removeprefix("mlx.core.")
        windowed = self.window is not None and self.window < self.k.shape[2]
        options = (self.causal, windowed, self.segments is not None, self.sinks is not None)
        grouped = self.q.shape[1] > self.k.shape[1]
        # A machine on which the order was measured needs no verdict for each length.
        keys = self.k.shape[2] if machine in ("", "metal") else 0
        longer_than = next((length for length in LENGTHS if keys > length), 0)
        return KernelShape(machine, self.q.shape[3], self.v.shape[3], dtype, grouped, *options, longer_than)

    @property
    def words(self) -> str:
        """The class of the call, in words that are the same on every machine."""
        fewer = self.q.shape[2] != self.k.shape[2]
        more = ["with a mask"] * (self.mask is not None) + ["fewer queries than keys"] * fewer
        return ", ".join([str(self.shape_class("")), *more])
