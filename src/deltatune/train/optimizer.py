"""Builds MLX optimizers and schedules by the names of mlx_lm.lora's YAML, and applies updates that are finite."""

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
    """Build the learning-rate schedule of the YAML key `lr_schedule`.

    Args:
        settings: `name` (one of SCHEDULES), `arguments` (a list), and optionally `warmup` (in optimizer steps) and
            `warmup_init` (the rate at the start, 0 by default). The warmup ends at the first argument, as in mlx_lm.

    Raises:
        UserError: If a key, the name, the arguments or the warmup is wrong.
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
    """Build the MLX optimizer that `config` names, with its `optimizer_config` and its learning rate or schedule.

    Raises:
        UserError: If a name or a setting is unknown or wrong.
    """
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
    """Return the Euclidean norm over all leaves, accumulated in fp32; a scalar.

    The leaves are added one after another. Stacking their sums would need a live buffer for each parameter.
    """
    total, *more = (leaf.astype(mx.float32).square().sum() for _, leaf in leaves(gradients))
    for square in more:
        total = total + square
    return mx.sqrt(total)


def clip_scale(norm: mx.array, clip: float) -> mx.array:
    """Return the factor that scales gradients of Euclidean norm `norm` down to `clip`; 1 if they are smaller."""
    return mx.minimum(clip / (norm + 1e-6), 1.0)


def apply(
    optimizer: mlx.optimizers.Optimizer,
    parameters: Any,
    gradients: Any,
    healthy: mx.array,
    clip: float | None,
    norm: mx.array | None = None,
) -> tuple[Any, mx.array]:
    """Make one optimizer step.

    If `healthy` is False or the norm is not finite, parameters and optimizer state stay as they are. The parameters are
    updated one after another, so that memory never holds all of them twice.

    Args:
        optimizer: The optimizer; its state is updated.
        parameters: The tree of parameters.
        gradients: Their gradients, a tree of the same structure.
        healthy: A boolean scalar, such as whether the loss is finite.
        clip: The largest norm that is not scaled down; None for no clipping.
        norm: The norm of all gradients, if `gradients` are only a part of them.

    Returns:
        The new parameters, and the gradients' norm before clipping.
    """
    norm = global_norm(gradients) if norm is None else norm
    healthy = mx.logical_and(healthy, mx.isfinite(norm))
    scale = None if clip is None else clip_scale(norm, clip)
    scalars = {name: value for name, value in optimizer.state.items() if isinstance(value, mx.array)}
    # Without gradients, this call only advances the schedules and the count of steps.
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
    """Copy `state` into the optimizer's own dictionary, to which compiled steps hold a reference."""
    optimizer.state.clear()
    optimizer.state.update(state)
