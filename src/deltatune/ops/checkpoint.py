"""Gradient checkpointing: a layer's intermediates are recomputed in the backward pass, for one layer at a time.

`mx.checkpoint` makes the recomputation wait for the layer's outputs, which exist since the forward pass, so that
several layers' intermediates can be in memory at once. Here the recomputation waits for the layer's cotangent, and the
cotangent that goes on to the layer below waits for this layer's weight gradients (docs/how/memory.md has figures).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import pieces
from .containers import ArgumentArrays, Rebuild, unknown_kind
from .functional import holding, is_floating, recomputed, trainable, undisturbed, with_gradient
from .layer_cut import layer_cut
from .pieces import Carry
from .random_state import drawing_from, repeatable
from .tracing import side_outputs, trace
from .watched_calls import as_subclasses


@contextmanager
def checkpointed(modules: Iterable[nn.Module], carries: Sequence[Carry | None] | None = None) -> Iterator[None]:
    """Within the context, checkpoint each of these layers; other layers of the same classes are not affected.

    Only a layer's arguments are saved for the backward pass, which recomputes it, with the same random numbers and the
    same segments of a packed batch; values and gradients stay as they are. A layer takes and returns arrays, scalars,
    strings, None, objects of containers.CONTAINERS, and lists, tuples and dicts of all these; it may change those
    objects alone. Only its arguments and trainable parameters get gradients: an array that it closes over gets none,
    without a warning. ValueError for a list or dict that it changed, and for a result without an array.

    Within the context, the class of each layer is a subclass of the same name, so that `isinstance`, attributes,
    parameter paths and `update` work as before. One that is already checkpointed stays as it is. A layer in evaluation
    mode runs without a checkpoint if it gets an object of another kind, such as a cache, since that is inference; in
    training mode such a call is a ValueError. A long row runs through a layer that has a `Carry` in pieces (pieces.py).
    RuntimeError where other code changed the class of a layer within the context.
    """
    layers = list(modules)
    carry_of = dict(zip(map(id, layers), carries or [None] * len(layers), strict=True))
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise ValueError(f"checkpointed: expected modules, got {type(layer).__name__}.")
    plain = [layer for layer in layers if "_deltatune_checkpointed" not in vars(type(layer))]
    with as_subclasses(plain, lambda original: _checkpointed_class(original, carry_of)):
        yield


def _checkpointed_class(original: type, carry_of: dict[int, Carry | None]) -> type:
    signature = inspect.signature(original.__call__)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def fn(*args: Any, **kwargs: Any) -> Any:
            return original.__call__(self, *args, **kwargs)

        unknown = unknown_kind((args, kwargs))
        if unknown is None:
            carry = carry_of.get(id(self))
            arguments = signature.bind(self, *args, **kwargs).arguments
            x, options = pieces.divisible(carry, list(arguments.items())[1:])
            if carry is not None and x is not None and (cut := layer_cut(x)) is not None:
                return pieces.in_pieces(fn, self, carry, x, cut, **options)
            return _run(fn, self, args, kwargs)
        if self.training:
            raise ValueError(
                f"{original.__name__} was given a {unknown}, which a second run of the layer would change again: "
                "train without it, or without checkpoints. If this is inference, call model.eval() first."
            )
        return fn(*args, **kwargs)

    body = {
        "__call__": call,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_deltatune_checkpointed": True,
    }
    return type(original.__name__, (original,), body)


def _run(fn: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    arguments = ArgumentArrays((args, kwargs))
    paths, parameters = trainable(module)
    told = trace.current()
    packing = told.segments
    collects = told.side_outputs is not None

    def run(inputs: list[mx.array]) -> tuple[list[mx.array], list[mx.array], Rebuild]:
        holder = holding(module, paths, inputs[: len(paths)])
        with holder, recomputed(), side_outputs.collecting(collects) as aside:
            arrays, rebuild = _outputs(fn, arguments, inputs[len(paths) :])
        return arrays, aside, rebuild

    results: list[tuple[int, Rebuild]] = []

    def forward(_key: mx.array, *inputs: mx.array) -> list[mx.array]:
        arrays, aside, rebuild = run(list(inputs))
        results.append((len(arrays), rebuild))
        return [*arrays, *aside]

    def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        return _gradients(run, module, packing, len(paths), primals, cotangents)

    # Integers have no gradient, and stop_gradient keeps MLX from following them back.
    inputs = [array if is_floating(array) else mx.stop_gradient(array) for array in [*parameters, *arguments.arrays]]
    if not inputs:
        return fn(*args, **kwargs)
    arguments.arrays.clear()
    with repeatable() as key:
        outputs = with_gradient(forward, backward)(mx.stop_gradient(key), *inputs)
    count, rebuild = results[0]
    side_outputs.collect(list(outputs[count:]))
    return rebuild(outputs[:count])


def _outputs(fn: Callable, arguments: ArgumentArrays, inputs: list[mx.array]) -> tuple[list[mx.array], Rebuild]:
    """Call `fn`, and return the arrays in its result and in the containers, and a way to rebuild the result."""
    args, kwargs = arguments.rebuild(inputs)
    arrays, rebuild = arguments.returned(fn(*args, **kwargs))
    if not arrays:
        raise ValueError("checkpoint: the function returned no array.")
    return arrays, rebuild


def _gradients(run, module, packing, num_parameters, primals, cotangents) -> list[mx.array]:
    """Run the function again when the cotangents exist, and return the gradients of the key and all arguments."""
    cotangents = [cotangent for cotangent in cotangents if is_floating(cotangent)]
    if not cotangents:
        return [mx.zeros_like(primal) for primal in primals]
    key, *inputs = mx.depends(list(primals), cotangents)
    if packing is not None:
        packing = mx.depends([packing], cotangents)[0]
    floating = [index for index, array in enumerate(inputs) if is_floating(array)]

    def recompute(*values: mx.array) -> list[mx.array]:
        arrays = list(inputs)
        for index, value in zip(floating, values, strict=True):
            arrays[index] = value
        with drawing_from(key), trace.having(segments=packing), undisturbed(module):
            outputs, aside, _ = run(arrays)
        # mx.vjp drops the cotangent of an output that is itself a stop_gradient, so contiguous wraps it. That costs
        # nothing, because only its gradient is evaluated.
        return [mx.contiguous(output) for output in [*outputs, *aside] if is_floating(output)]

    _, floating_gradients = mx.vjp(recompute, [inputs[index] for index in floating], cotangents)
    gradients = [mx.zeros_like(array) for array in inputs]
    for index, gradient in zip(floating, floating_gradients, strict=True):
        gradients[index] = gradient
    weights = gradients[:num_parameters]
    d_arguments = gradients[num_parameters:]
    if weights:
        # Each waits by itself, so that an unused gradient (of a mask of floats) is not computed with the others.
        d_arguments = [mx.depends([gradient], weights)[0] for gradient in d_arguments]
    return [mx.zeros_like(key), *weights, *d_arguments]
