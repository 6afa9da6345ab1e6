"""Computes the reference log-probabilities of a run once, and keeps them in a file beside its state.

The reference model is the model as training starts: the base, or the base with the adapter of --resume-adapter-file. A
new adapter changes nothing yet, so this needs no second model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data import BatchOrder, Splits
from ...data.preferences.preference import Preference
from ...machine.host_memory import as_numpy
from ...options.config import TrainConfig
from ..batch_loss import arrays, loss_of
from ..compiled import Compiled
from ..distributed import World
from ..preferences.objectives import answers_of
from ..reports.screen import Screen
from ..saved.state import write_atomically
from ..setup import Training, batch_order
from .evaluate import evaluating

_Parts = Mapping[str, tuple[BatchOrder, Sequence[Preference]]]


def fill(
    model: nn.Module,
    trained: Training,
    splits: Splits,
    config: TrainConfig,
    facts: Mapping[str, Any],
    world: World,
    screen: Screen,
) -> Callable[[], None]:
    """Set the reference of every preference, from the file of an earlier start of this run, or by computing it.

    `facts` are the digests on which the model's function depends (state.digests). Returned is a function that writes
    the file, for rank 0 to call once the run's folder is its own. Nothing is done for an objective without a reference.
    """
    if trained.objective is None or not trained.objective.needs_reference or trained.token_losses is None:
        return lambda: None
    parts: Any = {name: getattr(splits, name) for name in ("train", "valid", "test")}
    parts = {name: (batch_order(part, config, world), part) for name, part in parts.items() if part}
    facts = {**facts, "seed": config.seed if config.from_scratch else None}
    path = Path(config.adapter_path) / "reference" / f"{_digest(parts, facts)}.safetensors"
    shapes = {name: (len(preferences), 2) for name, (_, preferences) in parts.items()}
    stored = _read(path, shapes) if world.main else None
    was_stored = bool(world.sum_numbers(float(stored is not None))[0])
    values: dict[str, mx.array] = {}
    for name, (order, preferences) in parts.items():
        mine = stored[name] if stored is not None else mx.zeros(shapes[name])
        if not was_stored:
            mine = _log_probabilities(model, trained, order, *shapes[name])
        values[name] = world.sum(mine)
        for preference, reference in zip(preferences, as_numpy(values[name]), strict=True):
            preference.reference[:] = reference
    count = sum(len(preferences) for _, preferences in parts.values())
    how = f"read from {path}" if was_stored else f"computed once and kept in {path}"
    screen.say(f"Reference log-probabilities of {count:,} preferences: {how}.")
    return partial(_keep, path, values, was_stored)


def _keep(path: Path, values: dict[str, mx.array], read_before: bool) -> None:
    """Write the file unless it was found; the folder of an earlier run, in which it was, may have been moved away."""
    if not (read_before and path.is_file()):
        write_atomically(path, lambda file: mx.save_safetensors(file, values))


def _digest(parts: _Parts, facts: Mapping[str, Any]) -> str:
    content = {"facts": dict(facts), "data": {name: order.digest for name, (order, _) in parts.items()}}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def _read(path: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, mx.array] | None:
    """Return the arrays of the file, or None if there is no such file, or a damaged one, which is then recomputed."""
    if not path.is_file():
        return None
    try:
        values: Any = mx.load(str(path))
        mx.eval(values)
    except RuntimeError:
        return None
    return values if {name: tuple(value.shape) for name, value in values.items()} == dict(shapes) else None


def _log_probabilities(model: nn.Module, trained: Training, order: BatchOrder, *shape: int) -> mx.array:
    """Return the log-probabilities of this rank's share of the preferences, of this shape; 0 elsewhere."""
    token_losses, passes = trained.token_losses, trained.passes
    assert token_losses is not None

    def policy(inputs: mx.array, targets: mx.array, weights: mx.array, *more: Any) -> tuple[mx.array]:
        *images, preferences = more
        return (answers_of(token_losses(inputs, targets, *images), weights, preferences).policy,)

    whole = Compiled(lambda batch: loss_of(policy, batch), [model.state])
    log_probabilities = np.zeros(shape, np.float32)
    with evaluating(model):
        for batch in order.epoch():
            assert batch.preferences is not None
            of_batch = arrays(batch)
            (of_answers,) = whole(of_batch) if passes is None else passes.evaluate(of_batch, policy)
            values = as_numpy(of_answers)
            numbers = batch.preferences.numbers
            log_probabilities[numbers[numbers >= 0]] = values[numbers >= 0]
    return mx.array(log_probabilities)
