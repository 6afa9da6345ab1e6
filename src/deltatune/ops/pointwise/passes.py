"""A function as one pass over memory and its gradient as another, proven on this machine before its first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import mlx.core as mx

from .. import trial
from .pass_launch import Execute, Pass

# Elements that make a pass worth building its kernels, and proving them in each process: none for decoding.
LEAST = 2**16

Arrays = Sequence[mx.array]
# Of the largest element: a few roundings of the dtype's own.
BOUNDS = {mx.float32: 2.0**-17, mx.float16: 2.0**-8, mx.bfloat16: 2.0**-5}


@dataclass(frozen=True)
class Passes:
    """One function of arrays whose gradients the backward pass gives, then of parameters, then of `fixed` others.

    forward: the launch for the primals. backward: for the primals and the cotangents; its outputs are gradients.
    parameters: gradients of the parameters, by MLX's operations, computed only if they are wanted.
    plain: the same function by MLX's operations.
    """

    name: str
    forward: Callable[..., Pass]
    backward: Callable[..., Pass]
    plain: Callable[..., Arrays]
    parameters: Callable[[Arrays, Arrays], list[mx.array]] = lambda primals, cotangents: []
    fixed: int = 0

    def __call__(self, *arrays: mx.array, execute: Execute = Pass.run) -> list[mx.array]:
        return list(_function(self, execute)(*arrays))

    def proven(self, *kinds: trial.Kind, others: Arrays = (), execute: Execute = Pass.run) -> bool:
        """Whether both passes run here and agree with `plain` on random arrays of these shapes and dtypes, followed by
        `others`; looked at once a process for each name and kinds."""
        key = (self.name, kinds, len(others), execute)
        if key not in _known:
            _known[key] = _proven(self, kinds, others, execute)
        return _known[key]


_known: dict[Any, bool] = {}


@cache
def _function(passes: Passes, execute: Execute) -> Callable[..., Arrays]:
    forward: Any = mx.custom_function(lambda *arrays: execute(passes.forward(*arrays)))
    backward: Any = mx.custom_function(lambda *arrays: execute(passes.backward(*arrays)))

    def vjp(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        # MLX gives what is alone as it is.
        given, d = ([each] if isinstance(each, mx.array) else list(each) for each in (primals, cotangents))
        fixed = [mx.zeros_like(array) for array in given[len(given) - passes.fixed :]]
        return [*backward(*given, *d), *passes.parameters(given, d), *fixed]

    def refuse(*_: object) -> None:
        raise NotImplementedError(f"{passes.name} has no second derivative: its backward pass is written by hand.")

    forward.vjp(vjp)
    backward.vjp(refuse)
    return cast(Callable[..., Arrays], forward)


def _proven(passes: Passes, kinds: Sequence[trial.Kind], others: Arrays, execute: Execute) -> bool:
    drawn = trial.random_arrays(kinds)
    return trial.passes(passes.name, lambda: _difference(passes, drawn, others, execute), BOUNDS[kinds[0][1]])


def _difference(passes: Passes, arrays: list[mx.array], others: Arrays, execute: Execute) -> float:
    """From `plain`, over outputs and gradients."""
    made = passes(*arrays, *others, execute=execute)
    cotangents = [mx.random.normal(y.shape, key=mx.random.key(i)).astype(y.dtype) for i, y in enumerate(made)]
    wide = [array.astype(mx.float32) for array in arrays]
    _, found = mx.vjp(lambda *given: passes(*given, *others, execute=execute), arrays, cotangents)
    expected, wanted = mx.vjp(
        lambda *given: list(passes.plain(*given, *others)), wide, [c.astype(mx.float32) for c in cotangents]
    )
    return trial.largest_error([*made, *found], [*expected, *wanted])
