"""Builds MLX optimizers and schedules by the names of mlx_lm.lora's YAML, and applies updates that are finite.

Some parameters are updated without weight decay.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
from mlx.optimizers import schedulers
from mlx.utils import tree_map_with_path

from ...errors import UserError
from ...ops.pointwise.adam import AdamStep
from ...ops.pointwise.squares import sum_of_squares
from ...ops.pointwise.stored_moments import BLOCK, EightBitStep, dequantized, quantized
from ...options.config import OPTIMIZER_SETTINGS, TrainConfig
from ...options.values import Range, checked, nearest, short
from ..tree import leaves

# The names that transformers' Trainer leaves out of weight decay (get_decay_parameter_names), in lower case, and A_log.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)a_log$")
# The classes of norms. By name alone, `norm1` and `norm_f` would not be found.
_NORM = re.compile(r"(layer|rms|group|batch|instance)norm|norm$")


def undecayed(model: nn.Module) -> list[str]:
    """Return the paths of the trained parameters that weight decay leaves out: norms, biases and A_log.

    Decay pulls numbers to 0, where a norm or a gate is no simpler than elsewhere; some norms are stored as 1 + w.
    """
    norms = {path for path, module in model.named_modules() if _NORM.search(type(module).__name__.lower())}
    trained = [path for path, _ in leaves(model.trainable_parameters())]
    return [path for path in trained if path.rpartition(".")[0] in norms or _UNDECAYED.search(path.lower())]


def weight_decay(optimizer: mlx.optimizers.Optimizer) -> float:
    """Return the weight decay of an optimizer; 0 for one that has none."""
    return getattr(optimizer, "weight_decay", 0.0)


@contextmanager
def decaying(optimizer: Any, decays: bool) -> Iterator[None]:
    """Within the context, the optimizer has its weight decay, or none."""
    decay = weight_decay(optimizer)
    if decay and not decays:
        optimizer.weight_decay = 0.0
    try:
        yield
    finally:
        if decay and not decays:
            optimizer.weight_decay = decay


# The size from which a parameter's moments are quantised, as in bitsandbytes.
SMALLEST = 4096
# Without the kernel, a large parameter is updated in pieces, so that its moments are in fp32 for one piece at a time.
# Whole blocks.
PIECE = 2**22


def is_stored_in_8_bits(state: dict[str, Any]) -> bool:
    """Whether the moments in the state of a parameter are codes and scales."""
    return "m_scale" in state


class EightBit(mlx.optimizers.Adam):
    """Adam, or a class after it in a subclass, with moments in 8 bits and arithmetic in fp32."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Make the moments of a parameter: in fp32 below SMALLEST numbers, else codes and scales."""
        if parameter.size < SMALLEST:
            super().init_single(parameter, state)
            return
        for name in ("m", "v"):
            state[name] = mx.zeros(parameter.shape, mx.uint8)
            state[f"{name}_scale"] = mx.zeros(-(-parameter.size // BLOCK))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Return the updated parameter, and replace the moments in `state`."""
        if not is_stored_in_8_bits(state):
            return super().apply_single(gradient, parameter, state)
        flat = {"gradient": gradient, "parameter": parameter, "m": state["m"], "v": state["v"]}
        flat = {name: array.reshape(-1) for name, array in flat.items()}
        done: list[list[mx.array]] = []
        for start in range(0, parameter.size, PIECE):
            part = {name: array[start : start + PIECE] for name, array in flat.items()}
            if done:
                part["gradient"] = mx.depends([part["gradient"]], done[-1])[0]
            scales = {name: state[f"{name}_scale"][start // BLOCK : (start + PIECE) // BLOCK] for name in ("m", "v")}
            done.append(self._piece(part, scales))
        updated, m, m_scale, v, v_scale = (mx.concatenate(list(pieces)) for pieces in zip(*done, strict=True))
        state |= {"m": m.reshape(parameter.shape), "v": v.reshape(parameter.shape)}
        state |= {"m_scale": m_scale, "v_scale": v_scale}
        return updated.reshape(parameter.shape)

    def _piece(self, part: dict[str, mx.array], scales: dict[str, mx.array]) -> list[mx.array]:
        """Return the updated numbers, and the codes and scales of both moments."""
        moments = {name: dequantized(part[name], scales[name], signed=name == "m") for name in ("m", "v")}
        gradient = part["gradient"].astype(mx.float32)
        parameter = part["parameter"]
        updated = super().apply_single(gradient, parameter.astype(mx.float32), moments).astype(parameter.dtype)
        return [updated, *quantized(moments["m"], signed=True), *quantized(moments["v"], signed=False)]


class Adam8bit(EightBit):
    """Adam with moments in 8 bits."""


class AdamW8bit(EightBit, mlx.optimizers.AdamW):
    """AdamW with moments in 8 bits."""


Schedule = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class UpdateOptions:
    """How the updates of a run are made, each of `accumulate` micro-batches."""

    accumulate: int = 1
    # The largest gradient norm that is not scaled down; None for no clipping.
    clip: float | None = None
    # The paths of the parameters that are updated without weight decay.
    undecayed: Collection[str] = ()


OPTIMIZERS: dict[str, Callable[..., mlx.optimizers.Optimizer]] = {"adam8bit": Adam8bit, "adamw8bit": AdamW8bit}
OPTIMIZERS |= {
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
_RATE = Range(least=0)
_COUNT = Range(least=1)
_SHARE = Range(least=0, below=1)
_ABOVE_0 = Range(above=0)
# The type and the range of the arguments of schedules and the settings of optimizers, by name; `optimizer.name` where
# a name means something else in that optimizer. A list holds two numbers.
_SETTINGS: dict[str, tuple[Any, Range | None]] = {
    "init": (float, _RATE), "end": (float, _RATE), "decay_rate": (float, _ABOVE_0),
    "decay_steps": (float, _COUNT), "steps": (float, _COUNT), "step_size": (float, _COUNT),
    "weight_decay": (float, _RATE), "momentum": (float, _SHARE), "dampening": (float, Range(least=0, most=1)),
    "betas": (list[float], _SHARE), "beta_1": (float | None, _SHARE), "alpha": (float, _SHARE), "rho": (float, _SHARE),
    "eps": (float, _ABOVE_0), "adafactor.eps": (list[float], _ABOVE_0), "adafactor.decay_rate": (float, Range(below=0)),
    "clip_threshold": (float, _ABOVE_0), "ns_steps": (int, Range(least=1, most=100)), "nesterov": (bool, None),
    "bias_correction": (bool, None), "scale_parameter": (bool, None), "relative_step": (bool, None),
    "warmup_init": (bool, None),
}  # fmt: skip


def _check_setting(owner: str, name: str, value: Any, where: str) -> None:
    hint, limits = _SETTINGS.get(f"{owner}.{name}") or _SETTINGS.get(name, (Any, None))
    setting = checked(value, hint, {"range": limits}, where)
    if isinstance(setting, list) and len(setting) != 2:
        raise UserError(f"{where}: expected a list of 2 numbers, got {short(value)}.")


def build_schedule(settings: dict[str, Any]) -> Schedule:
    """Build the learning-rate schedule of the YAML key `lr_schedule`; a wrong setting is a UserError.

    The settings are `name` (one of SCHEDULES), `arguments` (a list), and optionally `warmup` (in optimizer steps) and
    `warmup_init` (the rate at the start, 0 by default). The warmup ends at the first argument, as in mlx_lm.
    """
    for key in settings:
        if key not in _SCHEDULE_KEYS:
            raise UserError(f"lr_schedule: unknown key {short(key)}{nearest(str(key), _SCHEDULE_KEYS)}.")
    name = settings.get("name")
    arguments = settings.get("arguments")
    if not isinstance(name, str) or name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise UserError(
            f"lr_schedule: unknown name {short(name)}{nearest(str(name), list(SCHEDULES))}; known: {known}."
        )
    expected = inspect.signature(SCHEDULES[name])
    if not isinstance(arguments, list) or not arguments:
        raise UserError(
            f"lr_schedule: `arguments` must list the arguments of {name}{expected}, got {short(arguments)}."
        )
    named = dict(zip(expected.parameters, arguments, strict=False))
    for parameter, value in named.items():
        _check_setting(name, parameter, value, f"lr_schedule: {parameter}")
    if not (named["init"] or named.get("end")):
        raise UserError(
            f"lr_schedule: {name}({', '.join(map(str, arguments))}) is 0 throughout; give a learning rate above 0."
        )
    try:
        schedule = SCHEDULES[name](*arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"lr_schedule: {name}{expected}: {error}") from error
    warmup = checked(
        settings.get("warmup", 0), int, {"range": Range(least=0)}, "lr_schedule: warmup, in optimizer steps"
    )
    start = checked(settings.get("warmup_init", 0.0), float, {"range": _RATE}, "lr_schedule: warmup_init")
    if warmup == 0:
        return schedule
    rising = schedulers.linear_schedule(start, arguments[0], warmup)
    return schedulers.join_schedules([rising, schedule], [warmup + 1])


def _rate_of(config: TrainConfig) -> float | Schedule:
    """Return the learning rate of a run, or its schedule: that of transformers for the same words and warmup."""
    if isinstance(config.lr_schedule, dict):
        return build_schedule(config.lr_schedule)
    updates = config.iters // config.grad_accumulation_steps
    warmup = math.ceil(config.warmup * updates) if config.warmup < 1 else int(config.warmup)
    # A share of a single update would be all of it, and leave its rate at 0.
    warmup = 0 if config.warmup < 1 and updates == 1 else warmup
    peak = config.learning_rate
    word = config.lr_schedule
    if word == "constant" and not warmup:
        return peak

    def rate(step: mx.array) -> mx.array:
        share = mx.clip((step - warmup) / max(updates - warmup, 1), 0, 1)
        courses = {"constant": mx.array(1.0), "cosine": 0.5 + 0.5 * mx.cos(math.pi * share), "linear": 1 - share}
        return peak * mx.where(step < warmup, step / max(warmup, 1), courses[word])

    return rate


def build_optimizer(config: TrainConfig) -> mlx.optimizers.Optimizer:
    """Build the MLX optimizer that `config` names, with its `optimizer_config` and its learning rate or schedule."""
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
        _check_setting(name, key, settings[key], f"optimizer_config: {name}: {key}")
    settings = {key: value for key, value in OPTIMIZER_SETTINGS.items() if key in known_settings} | settings
    rate = _rate_of(config)
    try:
        return OPTIMIZERS[name](learning_rate=rate, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer_config: {name}: {error}") from error


def global_norm(gradients: Any) -> mx.array:
    """Return the Euclidean norm over all leaves, accumulated in fp32; a scalar."""
    return mx.sqrt(sum_of_squares([leaf for _, leaf in leaves(gradients)]))


def clip_scale(norm: mx.array, clip: float) -> mx.array:
    """Return the factor that scales gradients of Euclidean norm `norm` down to `clip`; 1 if they are smaller."""
    return mx.minimum(clip / (norm + 1e-6), 1.0)


def apply(
    optimizer: mlx.optimizers.Optimizer,
    parameters: Any,
    gradients: Any,
    healthy: mx.array,
    clip: float | None,
    decays: Callable[[str], bool] = lambda path: True,
) -> tuple[Any, mx.array]:
    """Make one optimizer step: one parameter after another, so that memory never holds all of them twice.

    If the boolean scalar `healthy` is False or the norm is not finite, parameters and optimizer state stay as they are.
    `clip` is the largest norm that is not scaled down, and `decays` tells by path whether a parameter decays. Returns
    the new parameters, and the gradients' norm before clipping.
    """
    norm = global_norm(gradients)
    healthy = mx.logical_and(healthy, mx.isfinite(norm))
    scale = None if clip is None else clip_scale(norm, clip)
    scalars = {name: value for name, value in optimizer.state.items() if isinstance(value, mx.array)}
    # Without gradients, this call only advances the schedules and the count of steps.
    optimizer.apply_gradients({}, {})
    # A step is made once with weight decay and once without, while the optimizer has that setting.
    step_of = cache(lambda decays, in_8_bits: _kernel(optimizer, scale, healthy, in_8_bits))

    choose = partial(_choose, healthy)
    last: list[mx.array] = []

    def update(path: str, gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]) -> mx.array:
        nonlocal last
        old = dict(state)
        gradient = mx.depends([gradient], last)[0] if last else gradient
        with decaying(optimizer, decays(path)):
            step = step_of(decays(path), is_stored_in_8_bits(state))
            if step is not None and step.serves(parameter, gradient):
                updated, *moments = step(parameter, gradient, *(state[name] for name in step.moments))
                state |= dict(zip(step.moments, moments, strict=True))
                last = [updated]
                return updated
            gradient = (gradient if scale is None else gradient * scale).astype(parameter.dtype)
            updated = choose(optimizer.apply_single(gradient, parameter, state), parameter)
        for name, value in old.items():
            state[name] = choose(state[name], value)
        last = [updated, *state.values()]
        return updated

    updated = tree_map_with_path(update, gradients, parameters, optimizer.state)
    for name, value in scalars.items():
        optimizer.state[name] = choose(optimizer.state[name], value)
    return updated, norm


def _kernel(
    optimizer: mlx.optimizers.Optimizer, scale: mx.array | None, healthy: mx.array, stored_in_8_bits: bool
) -> AdamStep | EightBitStep | None:
    step = AdamStep.of(optimizer, scale, healthy, (Adam8bit, AdamW8bit))
    return EightBitStep(step) if step is not None and stored_in_8_bits else step


def _choose(healthy: mx.array, new: mx.array, old: mx.array) -> mx.array:
    return new if new is old else mx.where(healthy, new, old.astype(new.dtype))


def restore(optimizer: mlx.optimizers.Optimizer, state: dict[str, Any]) -> None:
    """Copy `state` into the optimizer's own dictionary, to which compiled steps hold a reference."""
    optimizer.state.clear()
    optimizer.state.update(state)
