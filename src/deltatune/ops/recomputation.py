"""Operators that are cheap to compute again, whose results a backward pass then need not keep.

The gradient of an adapter needs the adapter's input, which a norm or an activation computed in a pass over memory, from
arrays that are kept in any case. Within `cheap_recomputed` that pass is made again in the backward pass, and what the
first one computed is freed. So it is with the convolution before the gated delta rule, and with what the kernels of
that rule keep (gated_delta/fused_op.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import mlx.core as mx

from .functional import is_recomputed

Arrays = Sequence[mx.array]
Compute = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class Checkpoints:
    """What a backward pass computes again, so that the forward pass need not keep it.

    Attributes:
        layers: The positions of the layers of which only the input is kept.
        operators: Whether the other layers compute their cheap operators again.
    """

    layers: Sequence[int] = ()
    operators: bool = False


@dataclass
class _Last:
    """What an operator computed last, and how it is computed again, until another operator reads it."""

    arrays: Arrays = ()
    compute: Compute | None = None


_last: ContextVar[_Last | None] = ContextVar("deltatune_last_cheap_operator", default=None)


@contextmanager
def cheap_recomputed() -> Iterator[None]:
    """Within the context, a training step that is traced computes the results of cheap operators twice."""
    token = _last.set(_Last())
    try:
        yield
    finally:
        _last.reset(token)


def recomputes() -> bool:
    """Whether the results of cheap operators are computed twice: not in a layer that is computed again as a whole."""
    return _last.get() is not None and not is_recomputed()


def remember(arrays: Arrays, function: Callable[..., Arrays], *inputs: mx.array) -> None:
    """Remember that function(*inputs) gives `arrays`, for the operator that reads all of them next.

    It must give the same bits at each call, and the gradients that reach `inputs` must keep these in any case.
    """
    last = _last.get()
    if last is not None:
        last.arrays = arrays
        last.compute = lambda cotangents: function(*mx.depends(list(inputs), list(cotangents)))


def remembered(function: Callable[..., Arrays], *inputs: mx.array) -> Arrays:
    """Return function(*inputs) and remember it."""
    arrays = function(*inputs)
    remember(arrays, function, *inputs)
    return arrays


@dataclass(frozen=True)
class Input:
    """Arrays that an operator reads, as its backward pass gets them.

    Attributes:
        compute: Computes them once more when the given cotangents exist; None where they are kept.
    """

    compute: Compute | None

    def again(self, primals: Arrays, cotangents: Arrays) -> Arrays:
        """Return the arrays: the primals, or the results of their function once more."""
        return primals if self.compute is None else self.compute(cotangents)

    def before(self, dx: mx.array, gradients: Arrays) -> mx.array:
        """Return dx, which waits for the gradients that read the arrays again, so that these are soon freed."""
        return dx if self.compute is None else mx.depends([dx], list(gradients))[0]


def input_of(*arrays: mx.array) -> Input:
    """Return the arrays as an operator's input: they are computed again if they are what was remembered."""
    last = _last.get()
    if last is None:
        return Input(None)
    same = len(last.arrays) == len(arrays) and all(one is other for one, other in zip(last.arrays, arrays, strict=True))
    compute = last.compute if same and recomputes() else None
    last.arrays, last.compute = (), None
    return Input(compute)
