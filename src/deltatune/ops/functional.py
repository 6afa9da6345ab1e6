"""Runs a module with other arrays in the place of its parameters, as functions with custom gradients need it.

MLX gives an array that a custom function only closes over a gradient of zero, without a warning. Operators that run a
module inside such a function therefore take its trainable arrays as arguments (`trainable`), and let the module use
the arrays they are called with (`holding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .tracing import trace


def trainable(module: nn.Module) -> tuple[list[str], list[mx.array]]:
    """Return the paths and the arrays of the module's trainable floating-point parameters, in a fixed order."""
    flat: Any = tree_flatten(module.trainable_parameters())
    floating = [(path, array) for path, array in flat if is_floating(array)]
    return [path for path, _ in floating], [array for _, array in floating]


def arrays_of(tree: Any) -> dict[str, mx.array]:
    """Return the arrays of a tree, such as a module's parameters, by their paths."""
    flat: Any = tree_flatten(tree, destination={})
    return cast(dict[str, mx.array], flat)


def is_floating(array: mx.array) -> bool:
    """Whether an array is of a floating-point type, so that it can have a gradient."""
    return mx.issubdtype(array.dtype, mx.floating)


def as_list(arrays: Any) -> list[mx.array]:
    """Return the arrays passed to a rule of a custom function as a list: MLX passes a single array by itself."""
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)


def is_finite(array: mx.array) -> bool:
    """Whether an array holds neither NaN nor infinity; an array of integers never does. This waits for its values."""
    return not is_floating(array) or bool(mx.isfinite(array).all().item())


@contextmanager
def holding(module: nn.Module, paths: Sequence[str], arrays: Sequence[mx.array]) -> Iterator[None]:
    """Within the context, `module` holds `arrays` as its parameters at `paths`."""
    if not paths:
        yield
        return
    original = dict(tree_flatten(module.parameters()))
    module.update(tree_unflatten(list(zip(paths, arrays, strict=True))))
    try:
        yield
    finally:
        module.update(tree_unflatten([(path, original[path]) for path in paths]))


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Undo at the end of the context whatever was set on `module`, or on a module inside it, within the context."""
    snapshots = [(part, dict(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, entries, attributes in snapshots:
            dict.clear(part)
            dict.update(part, entries)
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give every module at the end of the context the mode, training or evaluation, that it had at its start."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        # A module comes after those that hold it, since their train() sets its mode too.
        for module, training in modes:
            if module.training != training:
                module.train(training)


def differentiated_once() -> AbstractContextManager[None]:
    """Within the context, the traced functions are a training step: nobody maps it, or differentiates its gradients.

    MLX keeps the rule of a custom function in the graph and walks through it at every step. Rules that only a second
    derivative or mx.vmap needs are therefore left out here. The context must enclose the call of mx.value_and_grad.
    """
    return trace.having(once=True)


def recomputed() -> AbstractContextManager[None]:
    """Within the context a layer runs that is checkpointed: its first run is for its output alone, its second run for
    its gradients alone. A layer's saved tensors are then needed in neither, or used at once.
    """
    return trace.having(recomputed=True)


def not_differentiated_again(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called in forward or backward passes written by hand, with a rule for its gradient.

    Only a derivative of such a pass asks for the rule, so `differentiated_once` leaves it out.
    """
    return function if trace.current().once else with_gradient(function, rule)


def with_gradient(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of MLX with the gradients rule(primals, cotangents, outputs)."""
    differentiable: Any = mx.custom_function(function)
    differentiable.vjp(rule)
    return cast(Callable[..., Any], differentiable)


def refuse_second_derivative(message: str) -> Callable[..., None]:
    """Return the vjp rule of a backward pass that is written by hand: it raises NotImplementedError(message)."""

    def refuse(*_: object) -> None:
        raise NotImplementedError(message)

    return refuse


def without_vmap(message: str) -> Callable[..., tuple[mx.array, ...]]:
    """Return the identity on arrays, with a vmap rule that raises ValueError(message).

    MLX asks this rule before it reaches functions behind it that have none. `differentiated_once` leaves it out.
    """
    return (lambda *arrays: arrays) if trace.current().once else _without_vmap(message)


@cache
def _without_vmap(message: str) -> Callable[..., tuple[mx.array, ...]]:
    def refuse(*_: object) -> None:
        raise ValueError(message)

    same: Any = with_gradient(lambda *arrays: arrays, lambda primals, cotangents, outputs: cotangents)
    same.vmap(refuse)
    return cast(Callable[..., tuple[mx.array, ...]], same)
