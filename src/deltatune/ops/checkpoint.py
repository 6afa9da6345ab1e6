"""Recompute a layer in the backward pass: when its cotangent arrives, and not before.

`mx.checkpoint` makes the recomputation wait for the layer's outputs, which have long been there, so several layers'
intermediates can live at once. Here it waits for the cotangent, and the cotangent handed on waits for the layer's
weight gradients, so that one layer is finished before the next begins (docs/how/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import segments
from .containers import ArgumentArrays, Rebuild, unknown_kind
from .functional import holding, is_floating, trainable, undisturbed
from .random_state import drawing_from, get_key


def checkpoint(fn: Callable, module: nn.Module | None = None) -> Callable:
    """`fn`, with the same values and gradients, keeping nothing for the backward pass but its arguments.

    Args:
        fn: called with arrays, scalars, strings, None, and lists, tuples and dicts of them, and the objects of
            containers.CONTAINERS; returns the same. Only what it is given gets a gradient: an array that it closes
            over gets none, silently. It must change nothing that it is given, those objects aside.
        module: whose trainable parameters `fn` uses, and which therefore count as given. None: `fn` itself, or the
            owner of the bound method `fn`, where that is a module.

    Integer and boolean arrays get no gradient. Random numbers drawn inside are drawn again alike, and the segments
    of a packed batch are those of the call.

    Raises (when called): ValueError, naming an argument of another kind, a list or dict that `fn` changed, or a
    result without an array.
    """
    owner = module
    if owner is None:
        owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(owner, nn.Module):
        owner = None

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _run(fn, owner, args, kwargs)

    return wrapped


@contextmanager
def checkpointed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, each of these layers recomputes in its backward pass; others of their class do not.

    A layer in evaluation mode that is given an object of unknown kind (a cache) runs as it is: that is inference.
    In training mode this is a ValueError. A layer that already recomputes is left alone.

    A layer's class becomes a subclass of the same name for as long as the context lasts, so `isinstance`, attribute
    reads, parameter paths and `update` stay as they are.
    """
    classes: dict[type, type] = {}
    changed: list[tuple[nn.Module, type]] = []
    try:
        for layer in modules:
            original = type(layer)
            if not isinstance(layer, nn.Module):
                raise ValueError(f"checkpointed: expected modules, got {original.__name__}.")
            if "_deltatune_checkpointed" in vars(original):
                continue
            if original not in classes:
                classes[original] = _recomputing(original)
            layer.__class__ = classes[original]
            changed.append((layer, original))
        yield
    finally:
        foreign = []
        for layer, original in changed:
            if type(layer) is classes[original]:
                layer.__class__ = original
            else:
                foreign.append(type(layer).__name__)
        if foreign:
            raise RuntimeError(f"checkpointed: somebody else changed the class of {foreign}; left as they are.")


def _recomputing(original: type) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def fn(*args: Any, **kwargs: Any) -> Any:
            return original.__call__(self, *args, **kwargs)

        unknown = unknown_kind((args, kwargs))
        if unknown is None:
            return _run(fn, self, args, kwargs)
        if self.training:
            raise ValueError(
                f"{original.__name__} was given a {unknown}, which a second run of the layer would change again: "
                "train without it, or without checkpoints. If this is inference, call model.eval() first."
            )
        return fn(*args, **kwargs)

    body = {"__call__": call, "__doc__": original.__doc__, "_deltatune_checkpointed": True}
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {**body, **named})


def _run(fn: Callable, module: nn.Module | None, args: tuple, kwargs: dict) -> Any:
    arguments = ArgumentArrays((args, kwargs))
    paths, parameters = trainable(module) if module is not None else ([], [])
    packing = segments.current()

    def run(given: list[mx.array]) -> tuple[list[mx.array], Rebuild]:
        with holding(module, paths, given[: len(paths)]) if module is not None else nullcontext():
            return _outputs(fn, arguments, given[len(paths) :])

    finish: list[Rebuild] = []

    def forward(_key: mx.array, *given: mx.array) -> list[mx.array]:
        arrays, rebuild = run(list(given))
        finish.append(rebuild)
        return arrays

    def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        return _gradients(run, module, packing, len(paths), primals, cotangents)

    # Integers go in as arguments too, cut off from what they were computed from, as they take no gradient.
    given = [array if is_floating(array) else mx.stop_gradient(array) for array in [*parameters, *arguments.arrays]]
    if not given:
        return fn(*args, **kwargs)
    arguments.arrays.clear()
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    outputs = function(mx.stop_gradient(get_key()), *given)
    return finish[0](outputs)


def _outputs(fn: Callable, arguments: ArgumentArrays, given: list[mx.array]) -> tuple[list[mx.array], Rebuild]:
    """The arrays of fn's result, and of the containers it changed; and how to make its result of them."""
    args, kwargs = arguments.rebuild(given)
    arrays, rebuild = arguments.returned(fn(*args, **kwargs))
    if not arrays:
        raise ValueError("checkpoint: the function returned no array.")
    return arrays, rebuild


def _gradients(run, module, packing, parameters, primals, cotangents) -> list[mx.array]:
    """Runs again once the cotangents are there; gradients of the key and of everything given."""
    arriving = [cotangent for cotangent in cotangents if is_floating(cotangent)]
    if not arriving:
        return [mx.zeros_like(primal) for primal in primals]
    key, *given = mx.depends(list(primals), arriving)
    if packing is not None:
        packing = mx.depends([packing], arriving)[0]
    floating = [index for index, array in enumerate(given) if is_floating(array)]

    def recompute(*values: mx.array) -> list[mx.array]:
        now = list(given)
        for index, value in zip(floating, values, strict=True):
            now[index] = value
        with drawing_from(key), segments.segments(packing), undisturbed(module):
            outputs, _ = run(now)
        # mx.vjp drops the cotangent of an output that is itself a stop_gradient; contiguous hides it, and costs
        # nothing: only its gradient is ever evaluated.
        return [mx.contiguous(output) for output in outputs if is_floating(output)]

    _, found = mx.vjp(recompute, [given[index] for index in floating], arriving)
    gradients = [mx.zeros_like(array) for array in given]
    for index, gradient in zip(floating, found, strict=True):
        gradients[index] = gradient
    weights = gradients[:parameters]
    # One at a time: what nobody differentiates (a mask of floats) must not be computed for the sake of the others.
    rest = [mx.depends([gradient], weights)[0] if weights else gradient for gradient in gradients[parameters:]]
    return [mx.zeros_like(key), *weights, *rest]
