"""Operators that are cheap to recompute, so that their results need not be saved for a backward pass.

The gradient of an adapter needs the adapter's input, which a norm or an activation computed in a pass over memory, from
arrays that are kept in any case. Within `cheap_recomputed` the backward pass repeats that pass, and the result of the
first one is freed. So it is with the convolution before the gated delta rule, and with the saved tensors of that rule's
kernels (gated_delta/fused_op.py).

MLX's own gradient of such an operator keeps every array between its inputs and its result, such as the sigmoid within
an activation. `from_inputs` keeps the inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..machine import backend
from .functional import as_list, with_gradient
from .tracing import dispatch, trace

# Arrays of fewer elements are not worth a rule of their own; a token alone, as in decoding, stays below.
LEAST = 2**16

Arrays = Sequence[mx.array]
Compute = Callable[[Arrays], Arrays]


@contextmanager
def small_cases() -> Iterator[list[str]]:
    """Within the context deltatune's cheap operators serve arrays of any size, and kernels' by MLX's operations.

    So a case of a few numbers shows whether a layer hands its arrays to them rightly, on any machine. Yielded is a list
    that grows by the name of each serving operator.
    """
    served: list[str] = []
    with dispatch.having(small_case=served):
        yield served


def is_small_case() -> bool:
    """Whether the code runs within small_cases()."""
    return dispatch.current().small_case is not None


def note(name: str) -> None:
    """Note within small_cases() that the operator of this name serves."""
    served = dispatch.current().small_case
    if served is not None:
        served.append(name)


def large_enough(x: mx.array) -> bool:
    """Whether an array is worth a rule of its own, or kernels; where kernels are counted, every array is."""
    return x.size >= LEAST or trace.current().next_tokens or is_small_case()


@dataclass(frozen=True)
class Checkpoints:
    """A checkpointing plan: the positions of layers that save only their input, and whether the others recompute their
    cheap operators.
    """

    layers: Sequence[int] = ()
    operators: bool = False


class _Result(NamedTuple):
    """The origin of an array from a cheap operator: `compute` returns `size` arrays, it at `place`."""

    place: int
    size: int
    compute: Compute


def cheap_recomputed() -> AbstractContextManager[None]:
    """Within the context, a training step that is traced computes the results of cheap operators twice."""
    return trace.having(cheap_twice=True)


def operators_pay() -> bool:
    """Whether cheap operators free more memory for their time than whole layers do: on GPUs, not on a CPU."""
    return backend.device() != "cpu"


def recomputes() -> bool:
    """Whether the results of cheap operators are computed twice: not in a layer that is recomputed as a whole."""
    told = trace.current()
    return told.cheap_twice and not told.recomputed


def remember(arrays: Arrays, function: Callable[..., Arrays], *inputs: mx.array) -> None:
    """Remember function(*inputs) as the origin of `arrays`, for operators that read all of them next.

    It must give the same bits at each call, and the gradients that reach `inputs` must keep these in any case.
    """
    told = trace.current()
    if not told.cheap_twice:
        return
    computed: list[Arrays] = []

    def compute(cotangents: Arrays) -> Arrays:
        # Several adapters may read the arrays. The one that gets its cotangents first has them computed for all.
        if not computed:
            computed.append(function(*mx.depends(list(inputs), list(cotangents))))
        return computed[0]

    told.known.forget(_Result)
    for place, array in enumerate(arrays):
        told.known.note(array, _Result(place, len(arrays), compute))


def keeps_inputs_alone() -> bool:
    """Whether `from_inputs` keeps the inputs alone: on Apple GPUs, and where cheap operators are recomputed.

    On Apple GPUs mx.compile fuses the recomputation with the gradient, which then reads fewer arrays. A layer that is
    recomputed as a whole keeps nothing for long in any case.
    """
    return recomputes() or (backend.device() == "metal" and not trace.current().recomputed)


def from_inputs(function: Callable[..., Arrays], *inputs: mx.array) -> Arrays:
    """Return function(*inputs), with a gradient that saves the inputs alone where `keeps_inputs_alone`.

    The gradient computes the function of arrays of floats again, and differentiates that. An array that `function`
    closes over gets none.
    """
    if not large_enough(inputs[0]) or not keeps_inputs_alone():
        return function(*inputs)
    note("from_inputs")

    def listed(*arrays: mx.array) -> list[mx.array]:
        return list(function(*arrays))

    def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        # Inputs that wait for the cotangents are other inputs to mx.compile, which would merge both runs otherwise.
        cotangents = as_list(cotangents)
        return mx.vjp(listed, mx.depends(as_list(primals), cotangents), cotangents)[1]

    return with_gradient(listed, backward)(*inputs)


def remembered(function: Callable[..., Arrays], *inputs: mx.array) -> Arrays:
    """Return function(*inputs) and remember it."""
    arrays = function(*inputs)
    remember(arrays, function, *inputs)
    note("remembered")
    return arrays


@dataclass(frozen=True)
class Input:
    """Arrays that an operator reads; `compute` makes them once more for given cotangents, None where they are kept."""

    compute: Compute | None

    def again(self, primals: Arrays, cotangents: Arrays) -> Arrays:
        """Return the arrays: the primals, or the results of their function once more."""
        return primals if self.compute is None else self.compute(cotangents)

    def before(self, dx: mx.array, gradients: Arrays) -> mx.array:
        """Return dx, which waits for the gradients that recompute the arrays, so these are soon freed."""
        return dx if self.compute is None else mx.depends([dx], list(gradients))[0]


def input_of(*arrays: mx.array) -> Input:
    """Return the arrays as an operator's input: they are recomputed if they are the remembered ones."""
    told = trace.current()
    if not told.cheap_twice:
        return Input(None)
    results = [told.known.of(array, _Result) for array in arrays]
    first = results[0]
    if first is None or results != [_Result(place, first.size, first.compute) for place in range(first.size)]:
        # Another array is read. The remembered ones will not be read soon, and are saved if they are read after all.
        told.known.forget(_Result)
        return Input(None)
    return Input(None if told.recomputed else first.compute)
