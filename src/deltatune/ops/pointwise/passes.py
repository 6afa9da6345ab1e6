"""A function that one kernel computes, and whose gradient a second one computes, after a trial on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import mlx.core as mx

from ..functional import as_list, not_differentiated_again, refuse_second_derivative
from ..recomputation import is_small_case, note
from ..trial import measure
from .pass_launch import Execute, Pass

# The fewest elements that are worth the time to build and try the kernels. Decoding, a token at a time, stays below.
LEAST = 2**16

Arrays = Sequence[mx.array]
# The largest error that a trial allows, over the largest element: a few roundings of the dtype.
BOUNDS = {mx.float32: 2.0**-17, mx.float16: 2.0**-8, mx.bfloat16: 2.0**-5}


@dataclass(frozen=True)
class Passes:
    """A function of arrays with a kernel for its value and one for its gradients.

    Its arguments are first the arrays whose gradients the backward kernel gives, then parameters, then `fixed` arrays
    without gradients.

    Args:
        name: the function's name for messages, different for each set of constants.
        forward: describes the launch for the arguments.
        backward: describes the launch for the arguments and the cotangents, whose outputs are gradients.
        plain: the same function by MLX's operations.
        parameters: the parameters' gradients, from the arguments, the cotangents and what runs a launch. MLX computes
            them only if something uses them.
        fixed: the number of arguments without gradients.
    """

    name: str
    forward: Callable[..., Pass]
    backward: Callable[..., Pass]
    plain: Callable[..., Arrays]
    parameters: Callable[[Arrays, Arrays, Execute], list[mx.array]] = lambda primals, cotangents, execute: []
    fixed: int = 0

    def __call__(self, *arrays: mx.array, execute: Execute = Pass.run) -> list[mx.array]:
        if is_small_case():
            note(self.name)
            return list(self.plain(*arrays))
        return list(_function(self, execute)(*arrays))

    def passes_trial(self, *kinds: measure.Kind, others: Arrays = (), execute: Execute = Pass.run) -> bool:
        """Whether both kernels run here and agree with `plain`, which is tried once in a process for each kind.

        Args:
            kinds: the shapes and dtypes of random arguments.
            others: the arguments after them.
            execute: runs a launch; tests run it on the host machine.
        """
        if is_small_case():
            return True
        key = (self.name, kinds, len(others), execute)
        if key not in _trials:
            _trials[key] = _passes_trial(self, kinds, others, execute)
        return _trials[key]


# The results of the trials of this process.
_trials: dict[Any, bool] = {}


@cache
def _function(passes: Passes, execute: Execute) -> Callable[..., Arrays]:
    forward: Any = mx.custom_function(lambda *arrays: execute(passes.forward(*arrays)))
    message = f"{passes.name} has no second derivative: its backward pass is written by hand."

    def backward(*arrays: mx.array) -> list[mx.array]:
        return execute(passes.backward(*arrays))

    def vjp(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        given, d = as_list(primals), as_list(cotangents)
        fixed = [mx.zeros_like(array) for array in given[len(given) - passes.fixed :]]
        gradients = not_differentiated_again(backward, refuse_second_derivative(message))(*given, *d)
        return [*gradients, *passes.parameters(given, d, execute), *fixed]

    forward.vjp(vjp)
    return cast(Callable[..., Arrays], forward)


def _passes_trial(passes: Passes, kinds: Sequence[measure.Kind], others: Arrays, execute: Execute) -> bool:
    arrays = measure.random_arrays(kinds)
    return measure.passes(passes.name, lambda: _error(passes, arrays, others, execute), BOUNDS[kinds[0][1]])


def _error(passes: Passes, arrays: list[mx.array], others: Arrays, execute: Execute) -> float:
    """The largest error of the outputs and gradients, compared with those of `plain` in fp32."""
    outputs = passes(*arrays, *others, execute=execute)
    cotangents = [mx.random.normal(y.shape, key=mx.random.key(i)).astype(y.dtype) for i, y in enumerate(outputs)]
    _, gradients = mx.vjp(lambda *given: passes(*given, *others, execute=execute), arrays, cotangents)
    arrays, cotangents = ([array.astype(mx.float32) for array in group] for group in (arrays, cotangents))
    expected = mx.vjp(lambda *given: list(passes.plain(*given, *others)), arrays, cotangents)
    return measure.largest_error([*outputs, *gradients], [*expected[0], *expected[1]])
