"""MLX optimizers and schedules by name, as mlx_lm.lora's YAML names them, and an update that NaN cannot reach."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.optimizers import schedulers
from mlx.utils import tree_map

from ..config import TrainConfig, nearest
from ..errors import UserError
from ..ops.pointwise import adam
from .tree import leaves

Schedule = Callable[[mx.array], mx.array]

OPTIMIZERS: dict[str, Callable[..., mlx.optimizers.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(mlx.optimizers).items()
    if inspect.isclass(kind)
    and issubclass(kind, mlx.optimizers.Optimizer)
    and kind not in (mlx.optimizers.Optimizer, mlx.optimizers.MultiOptimizer)
}
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    name: getattr(schedulers, name) for name in ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")
}
_SCHEDULE_KEYS = ["name", "arguments", "warmup", "warmup_init"]


def build_schedule(settings: dict[str, Any]) -> Schedule:
    """The schedule of a YAML `lr_schedule`: name, arguments, warmup (steps), warmup_init (rate, default 0).

    Steps are optimizer steps. The warmup ends at the first argument, as in mlx_lm. UserError names what is wrong.
    """
    for key in settings:
        if key not in _SCHEDULE_KEYS:
            raise UserError(f"lr_schedule: unknown key {key!r}{nearest(str(key), _SCHEDULE_KEYS)}.")
    name, arguments = settings.get("name"), settings.get("arguments")
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise UserError(f"lr_schedule: unknown name {name!r}{nearest(str(name), list(SCHEDULES))}; known: {known}.")
    if not isinstance(arguments, list) or not arguments:
        expected = inspect.signature(SCHEDULES[name])
        raise UserError(f"lr_schedule: `arguments` must list the arguments of {name}{expected}, got {arguments!r}.")
    try:
        schedule = SCHEDULES[name](*arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"lr_schedule: {name}{tuple(arguments)}: {error}") from error
    warmup = settings.get("warmup", 0)
    if not isinstance(warmup, int) or warmup < 0:
        raise UserError(f"lr_schedule: warmup must be a number of optimizer steps, got {warmup!r}.")
    if warmup == 0:
        return schedule
    rising = schedulers.linear_schedule(settings.get("warmup_init", 0.0), arguments[0], warmup)
    return schedulers.join_schedules([rising, schedule], [warmup + 1])


def build_optimizer(config: TrainConfig) -> mlx.optimizers.Optimizer:
    """The MLX optimizer that `config` names, with its `optimizer_config` entry and rate or schedule."""
    name = config.optimizer.lower()
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UserError(
            f"optimizer: unknown name {config.optimizer!r}{nearest(name, list(OPTIMIZERS))}; known: {known}."
        )
    for other in config.optimizer_config:
        if other not in OPTIMIZERS:
            raise UserError(f"optimizer_config: unknown optimizer {other!r}{nearest(other, list(OPTIMIZERS))}.")
    settings = config.optimizer_config.get(name) or {}
    known_settings = [key for key in inspect.signature(OPTIMIZERS[name]).parameters if key != "learning_rate"]
    for key in settings:
        if key not in known_settings:
            raise UserError(
                f"optimizer_config: {name} has no setting {key!r}{nearest(str(key), known_settings)}; "
                f"it has {', '.join(known_settings)}."
            )
    rate = build_schedule(config.lr_schedule) if config.lr_schedule else config.learning_rate
    try:
        return OPTIMIZERS[name](learning_rate=rate, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer_config: {name}: {error}") from error


def global_norm(gradients: Any) -> mx.array:
    """The Euclidean norm over every leaf, accumulated in fp32; a scalar.

    Added up one leaf after another: all of their sums at once would be a live buffer a parameter.
    """
    total, *more = (leaf.astype(mx.float32).square().sum() for _, leaf in leaves(gradients))
    for square in more:
        total = total + square
    return mx.sqrt(total)


def clip_scale(norm: mx.array, clip: float) -> mx.array:
    """What gradients of that norm are multiplied with."""
    return mx.minimum(clip / (norm + 1e-6), 1.0)


def apply(
    optimizer: mlx.optimizers.Optimizer,
    parameters: Any,
    gradients: Any,
    healthy: mx.array,
    clip: float | None,
    norm: mx.array | None = None,
) -> tuple[Any, mx.array]:
    """One optimizer step; returns the new parameters and the gradients' norm before clipping.

    Where `healthy` is False or the norm is not finite, parameters and optimizer state come out as they went in. Where
    `gradients` are a part of all, `norm` is that of all, and the state of the others is not touched.
    One parameter is updated after another, so that not all of them are there twice.
    """
    norm = global_norm(gradients) if norm is None else norm
    healthy = mx.logical_and(healthy, mx.isfinite(norm))
    scale = None if clip is None else clip_scale(norm, clip)
    scalars = {name: value for name, value in optimizer.state.items() if isinstance(value, mx.array)}
    # With nothing to update, only schedules and the count of steps move.
    optimizer.apply_gradients({}, {})
    step = adam.AdamStep.of(optimizer, scale, healthy)

    def choose(new: mx.array, old: mx.array) -> mx.array:
        return new if new is old else mx.where(healthy, new, old.astype(new.dtype))

    last: list[mx.array] = []

    def update(gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]) -> mx.array:
        nonlocal last
        old = dict(state)
        if last:
            gradient = mx.depends([gradient], last)[0]
        if step is not None and parameter.dtype == mx.float32:
            updated, state["m"], state["v"] = step(parameter, gradient.astype(mx.float32), state["m"], state["v"])
            last = [updated]
            return updated
        gradient = (gradient if scale is None else gradient * scale).astype(parameter.dtype)
        updated = choose(optimizer.apply_single(gradient, parameter, state), parameter)
        for name, value in old.items():
            state[name] = choose(state[name], value)
        last = [updated, *state.values()]
        return updated

    updated = tree_map(update, gradients, parameters, optimizer.state)
    for name, value in scalars.items():
        optimizer.state[name] = choose(optimizer.state[name], value)
    return updated, norm


def restore(optimizer: mlx.optimizers.Optimizer, state: dict[str, Any]) -> None:
    """Put `state` into the optimizer's own dictionary, which compiled steps hold on to."""
    optimizer.state.clear()
    optimizer.state.update(state)
