"""Live runs: transformers against deltatune, and the recordings made from them. Needs torch."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltatune.selftest.parity import ours, recording
from deltatune.selftest.parity.cases import (
    FALL,
    NUDGED_LIMIT,
    ROUTE_LIMIT,
    Adapters,
    ParityCase,
    ParityRun,
    initial_adapters,
)
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.recording import Difference

from . import quantised, theirs

PACKAGES = ("transformers", "torch", "peft", "numpy", "mlx", "mlx-lm")


@dataclass(frozen=True)
class Reference:
    """A run of transformers and PEFT, and its start."""

    config: Config
    weights: Weights
    targets: dict[str, tuple[int, int]]
    initial: Adapters
    run: ParityRun
    nearest_route: float

    @property
    def fall(self) -> float:
        """The share by which the loss fell, from the first cycle of batches to the last."""
        return 1 - float(np.mean(self.run.losses[-3:]) / np.mean(self.run.losses[:3]))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within the context, torch computes on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def moved(weights: Weights, seed: int) -> Weights:
    """Every weight moved by about 1e-7 of itself."""
    draw = np.random.default_rng(seed)
    return {
        name: (value * (1 + 1e-7 * draw.standard_normal(value.shape))).astype(np.float32)
        for name, value in weights.items()
    }


def reference(case: ParityCase, nudge: int = 0) -> Reference:
    """Run transformers and PEFT. nudge: a seed that moves every weight by about 1e-7 of itself."""
    config, shapes = theirs.layout(case)
    weights = case.family.weights(shapes)
    taken = weights
    if case.bits is not None:
        taken = quantised.dequantised(ours.load(case, config, weights), weights, config)
    if nudge:
        taken = moved(taken, nudge)
    with one_thread():
        model = theirs.load(config, taken)
        targets = theirs.targets(case, model)
        adapters = initial_adapters(targets)
        routes = theirs.Routes(model)
        parameters = theirs.adapt(case, model, adapters)
        initial = theirs.copied(parameters)
        run = theirs.train(case, model, parameters)
    return Reference(config, weights, targets, initial, run, routes.nearest)


def difference(reference: Reference, run: ParityRun) -> Difference:
    """How far a run is from the reference, whole tensors compared."""
    gaps = np.abs(np.subtract(run.losses, reference.run.losses))
    step = int(np.argmax(gaps))
    return Difference(
        float(gaps[step]),
        step,
        *_worst(run.gradients, reference.run.gradients, None),
        *_worst(run.final, reference.run.final, reference.initial),
    )


def compare(case: ParityCase, reference: Reference) -> Difference:
    """Run deltatune from the same start and say how far it is from transformers."""
    adapters = initial_adapters(reference.targets)
    return difference(reference, ours.run(case, reference.config, reference.weights, adapters))


def _worst(found: Adapters, expected: Adapters, start: Adapters | None) -> tuple[float, str]:
    ours_flat, theirs_flat = recording.flat(found), recording.flat(expected)
    starts = {} if start is None else recording.flat(start)
    errors = {
        name: float(np.linalg.norm(ours_flat[name] - value) / np.linalg.norm(value - starts.get(name, 0.0)))
        for name, value in theirs_flat.items()
    }
    name = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return errors[name], name


def nudged(case: Any, base: Reference, run: Callable[[Any, int], Reference] = reference) -> Difference:
    """How far transformers drifts from itself when its weights move by 1e-7 of themselves: the largest of 3 draws."""
    drifts = [difference(base, run(case, draw).run) for draw in (1, 2, 3)]
    return max(drifts, key=lambda drift: drift.adapter)


def record(name: str, case: ParityCase) -> tuple[Reference, Difference]:
    """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
    base = reference(case)
    drift = nudged(case, base)
    write(name, base, drift, recording.checksums(base.weights), PACKAGES)
    return base, drift


def write(name: str, base: Reference, drift: Difference, checksums: Any, packages: Sequence[str]) -> None:
    """Write the recording of a run of transformers, with how far it drifts from itself."""
    if base.fall < FALL or drift.adapter > NUDGED_LIMIT or base.nearest_route < ROUTE_LIMIT:
        raise ValueError(
            f"{name}: loss falls by {base.fall:.0%}, adapters drift by {drift.adapter:.1e}, comes within "
            f"{base.nearest_route:.1e} of another route: take another `draw`."
        )
    recording.write(
        name,
        {
            "date": datetime.date.today().isoformat(),
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "nudged": {"loss": drift.loss, "gradient": drift.gradient, "adapter": drift.adapter},
            "nearest_route": None if base.nearest_route == float("inf") else base.nearest_route,
            "config": base.config,
            "shapes": {key: value.shape for key, value in base.weights.items()},
            "targets": base.targets,
            "checksums": checksums,
            "losses": base.run.losses,
            "gradients": recording.summary(base.run.gradients),
            "adapters": recording.summary(base.run.final, base.initial),
        },
    )
