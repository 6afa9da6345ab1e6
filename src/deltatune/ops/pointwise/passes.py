"""Launches with a lane for each piece of work; and functions with such a kernel for their value and their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import mlx.core as mx

from ..functional import as_list, not_differentiated_again, refuse_second_derivative, with_gradient
from ..kernels.launch import LANES, Device, Kernel, Launch, Outputs, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload, in_each_dtype
from ..operator.measure import Kind, in_float64, random_arrays
from ..recomputation import is_small_case, note

BODIES = ("passes/pointwise.h", "passes/heads.h", "passes/packed.h", "passes/stored_moments.h")


def by_lane(
    name: str,
    inputs: dict[str, mx.array],
    outputs: Outputs,
    arguments: tuple[str, ...],
    lanes: int,
    constants: tuple[int, ...] = (),
    resident: int = 0,
) -> Launch:
    """Return the launch of the kernel body `name`, for so many lanes, with compile-time constants.

    `arguments` are written in the kernel's text: all, or those before its arrays. So many blocks as `resident` must fit
    on a multiprocessor, which bounds a lane's registers; 0 sets no bound.
    """
    if not any(name in arguments for name in inputs | outputs):
        arguments = (*arguments, *inputs, *outputs)
    kinds = tuple([(array.shape, array.dtype) for array in inputs.values()])
    plan = _plan(name, kinds, tuple(outputs.items()), arguments, lanes, constants)
    return _kernel(name, resident).launch(inputs, plan)


@lru_cache(maxsize=1024)
def _plan(
    name: str,
    kinds: tuple[Any, ...],
    outputs: tuple[tuple[str, Any], ...],
    arguments: tuple[str, ...],
    lanes: int,
    constants: tuple[int, ...],
) -> Plan:
    values = f"<{', '.join(map(str, constants))}>" if constants else ""
    text = f"{values}(at, {', '.join(arguments)})"
    return Plan(outputs=dict(outputs), blocks=(-(-lanes // LANES), 1, 1), groups=LANES // 32, text=text)


@cache
def _kernel(name: str, resident: int) -> Kernel:
    return Kernel(name=name, files=BODIES, bounded=resident > 0, resident=resident)


def size_of(name: str, array: mx.array) -> str:
    """Return the text of the number of elements of an input called `name`."""
    return " * ".join(f"(long){name}_shape[{axis}]" for axis in range(array.ndim)) or "1"


def pieces_of(name: str, array: mx.array) -> str:
    """Return the text of the number of pieces of eight elements of an input called `name`."""
    return f"{size_of(name, array)} / 8"


# The fewest elements that are worth the time to build and try the kernels. Decoding, a token at a time, stays below.
LEAST = 2**16

Arrays = Sequence[mx.array]
# The largest error that a trial allows, over the largest element: a few roundings of the dtype.
BOUNDS = {mx.float32: 2.0**-17, mx.float16: 2.0**-8, mx.bfloat16: 2.0**-5}


@dataclass(frozen=True)
class Passes:
    """A function of arrays with a kernel for its value and one for its gradients.

    Its arguments are first the arrays that get gradients from the backward kernel, then parameters, then `fixed` arrays
    without gradients.

    Args:
        name: The function's name for messages, different for each set of constants.
        forward: Describes the launch for the arguments.
        backward: Describes the launch for the arguments and the cotangents; its outputs are gradients.
        plain: The same function by MLX's operations.
        parameters: The parameters' gradients, from the arguments and the cotangents, which MLX computes only if used.
        fixed: The number of arguments without gradients.
    """

    name: str
    forward: Callable[..., Launch]
    backward: Callable[..., Launch]
    plain: Callable[..., Arrays]
    parameters: Callable[[Arrays, Arrays], list[mx.array]] = lambda primals, cotangents: []
    fixed: int = 0

    def __call__(self, *arrays: mx.array) -> list[mx.array]:
        if is_small_case():
            note(self.name)
            return list(self.plain(*arrays))
        return list(_function(self)(*arrays))

    def passes_trial(self, *kinds: Kind, others: Arrays = (), device: Device | None = None) -> bool:
        """Whether both kernels are for this device and agree with `plain`, which is tried once for each kind.

        The trial has random arguments of these shapes and dtypes, followed by `others`.
        """
        return OPERATOR.serves(self, kinds, arrays=others, device=device)

    def workloads(self, name: str, shapes: Sequence[tuple[int, ...]], *others: mx.array) -> list[KernelWorkload]:
        """Return the workloads of the self-test: arguments of these shapes, and others, in each dtype."""
        return in_each_dtype(name, lambda dtype: self.trial_case([(shape, dtype) for shape in shapes], *others))

    def trial_case(self, kinds: Sequence[Kind], *others: mx.array) -> Case[Device]:
        """Return the case of random arguments of these kinds, and others; `plain` computes its truth in float64."""
        arrays = random_arrays(kinds)
        outputs = self.forward(*arrays, *others).outputs
        cotangents = [
            mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
            for i, (shape, dtype) in enumerate(outputs.values())
        ]

        def differentiated(function: Callable[..., Arrays], *groups: Arrays) -> list[mx.array]:
            results, gradients = mx.vjp(lambda *primals: list(function(*primals, *others)), *map(list, groups))
            return [*results, *gradients]

        return Case(
            name=self.name,
            results=[*outputs, *(f"gradient {i}" for i in range(len(arrays)))],
            call=by_kernels(lambda: differentiated(self, arrays, cotangents)),
            truth=lambda: in_float64(partial(differentiated, self.plain), arrays, cotangents),
            bound=BOUNDS[kinds[0][1]],
            like=[*arrays, *cotangents],
        )


OPERATOR = KernelOperator("passes", Passes.trial_case)


def wide(array: mx.array) -> mx.array:
    """Return an array in fp32; one in float64, in which truths are computed, stays as it is."""
    return array if array.dtype == mx.float64 else array.astype(mx.float32)


@cache
def _function(passes: Passes) -> Callable[..., Arrays]:
    message = f"{passes.name} has no second derivative: its backward pass is written by hand."

    def backward(*arrays: mx.array) -> list[mx.array]:
        return passes.backward(*arrays)()

    def vjp(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        arrays, d = as_list(primals), as_list(cotangents)
        fixed = [mx.zeros_like(array) for array in arrays[len(arrays) - passes.fixed :]]
        gradients = not_differentiated_again(backward, refuse_second_derivative(message))(*arrays, *d)
        return [*gradients, *passes.parameters(arrays, d), *fixed]

    return with_gradient(lambda *arrays: passes.forward(*arrays)(), vjp)
