"""Says by plans how much less memory a step takes with 8-bit moments, or with a lower rank of experts."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from typing import NamedTuple

import mlx.nn as nn

from ..lora.convert import adapters
from ..options.config import TrainConfig
from ..train.setup import Run, load_model, prepare
from ..train.tree import nbytes
from ..train.updates.optimizer import build_optimizer
from .screen import size

#: Returns the peak of the run's step, in bytes, with another model or other options.
Planned = Callable[[nn.Module, TrainConfig], int]

# The optimizers that have a form with moments of 8 bits.
_IN_8_BITS = {"adam": "adam8bit", "adamw": "adamw8bit"}
# A change that saves less than this share of the peak is not worth its words.
_LEAST_SHARE = 0.02


class _Change(NamedTuple):
    """Options that take memory away, as they are typed, and a run's options with them."""

    words: str
    config: TrainConfig


def advice(run: Run, peak: int, over: int, planned: Planned) -> str:
    """Return one sentence on 8-bit moments and a lower rank for experts, or nothing where they would hardly help.

    `over` bytes of the step's planned `peak` are too much; it is less than 1 where the step fits. `planned` is called
    twice at most.
    """
    config = run.config
    if config.resume:
        return ""
    trained = nbytes(run.model.trainable_parameters())
    moments_now = _moments(run.model, config)
    what = "Trained weights" if config.fine_tune_type == "full" else "Adapters"
    taken = f"{what}, their gradients and moments take {size(2 * trained + moments_now)}"
    # A pass holds the gradients of a micro-batch beside their sums, and at most once more.
    if over > 4 * trained + moments_now:
        return f"{taken}; without them it would not fit, either."
    said = []
    left = peak
    least = int(_LEAST_SHARE * peak)
    moments = _moments_in_8_bits(config)
    if moments is not None and moments_now - _moments(run.model, moments.config) >= least:
        config = moments.config
        left = planned(run.model, moments.config)
        said.append(f"{moments.words} takes {_at_least(peak - left)} less")
    if not 0 < over <= peak - left:
        ranks = _lower_rank_of_experts(run.model, config, over - (peak - left), least)
        if ranks is not None:
            other = load_model(ranks.config, image=run.image, lazy=True).model
            prepare(other, ranks.config)
            before = left
            left = planned(other, ranks.config)
            said.append(f"{ranks.words} {'another ' if said else 'takes '}{_at_least(before - left)} less")
    if not said:
        return ""
    end = "; it fits then" if peak - left >= over else "; that alone is not enough"
    end = "" if over < 1 else end
    return f"{taken}: {', '.join(said)}{end}."


def _moments_in_8_bits(config: TrainConfig) -> _Change | None:
    """The same optimizer with moments in 8 bits, if there is one."""
    name = config.optimizer.lower()
    if name not in _IN_8_BITS:
        return None
    settings = dict(config.optimizer_config)
    chosen = settings.pop(name, None)
    moved = f" (with optimizer_config's {name} under that name)" if chosen else ""
    settings |= {_IN_8_BITS[name]: chosen} if chosen else {}
    changed = dataclasses.replace(config, optimizer=_IN_8_BITS[name], optimizer_config=settings)
    return _Change(f"--optimizer {_IN_8_BITS[name]}{moved}", changed)


def _lower_rank_of_experts(model: nn.Module, config: TrainConfig, over: int, least: int) -> _Change | None:
    """Half of the experts' rank, or a half of that and so on with which, by arithmetic, `over` bytes less are held.

    None where that saves less than `least` bytes, or the experts' ranks are the user's choice already.
    """
    experts = {path: adapter for path, adapter in adapters(model).items() if adapter["lora_a"].ndim == 3}
    holders = {path.split(".")[-2] for path in experts}
    ranks = {adapter["lora_a"].shape[1] for adapter in experts.values()}
    pattern = f"*.{min(holders, default='')}.*"
    chosen = config.lora_parameters.rank_pattern.keys() - {pattern}
    if len(holders) != 1 or len(ranks) != 1 or chosen or config.resume_adapter_file is not None:
        return None
    (rank,) = ranks
    factors = [adapter[name] for adapter in experts.values() for name in ("lora_a", "lora_b")]
    numbers, of_experts = (nbytes(tree) for tree in (model.trainable_parameters(), factors))
    # Factors, their gradients, and their share of the moments.
    held = 2 * of_experts + _moments(model, config) * of_experts // numbers
    halves = [rank >> times for times in range(1, rank.bit_length())]
    lower = next((half for half in halves if held * (rank - half) // rank >= over), rank // 2)
    if lower < 1 or held * (rank - lower) // rank < least:
        return None
    patterns = {pattern: lower}
    changed = dataclasses.replace(config.lora_parameters, rank_pattern=patterns)
    words = f"--rank-pattern {shlex.quote(json.dumps(patterns))}"
    return _Change(words, dataclasses.replace(config, lora_parameters=changed))


def _moments(model: nn.Module, config: TrainConfig) -> int:
    """Return the bytes of the optimizer's state for the trainable parameters; nothing is computed."""
    optimizer = build_optimizer(config)
    optimizer.init(model.trainable_parameters())
    return nbytes(optimizer.state)


def _at_least(count: int) -> str:
    """Bytes as size() gives them, rounded down."""
    unit = 10**7 if count >= 1e9 else 10**5
    return size(max(count, 0) // unit * unit)
