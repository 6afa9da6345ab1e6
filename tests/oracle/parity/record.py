"""Live runs: transformers against deltatune, and the recordings made from them. Needs torch."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from . import ours, quantised, recording, theirs
from .cases import FALL, NUDGED_LIMIT, ROUTE_LIMIT, Adapters, Case, initial_adapters
from .families import Config, Weights
from .recording import Difference

PACKAGES = ("transformers", "torch", "peft", "numpy", "mlx", "mlx-lm")


@dataclass(frozen=True)
class Reference:
    """A run of transformers and PEFT, and what it started from."""

    config: Config
    weights: Weights
    targets: dict[str, tuple[int, int]]
    losses: list[float]
    initial: Adapters
    final: Adapters
    nearest_route: float

    @property
    def fall(self) -> float:
        """The share by which the loss fell, from the first cycle of batches to the last."""
        return 1 - float(np.mean(self.losses[-3:]) / np.mean(self.losses[:3]))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reference(case: Case, nudge: int = 0) -> Reference:
    """Run transformers and PEFT. nudge: a seed that moves each initial adapter value by about 1e-7 of itself."""
    config, shapes = theirs.layout(case)
    weights = case.family.weights(shapes)
    taken = weights
    if case.bits is not None:
        taken = quantised.dequantised(ours.load(case, config, weights), weights, config)
    with _one_thread():
        model = theirs.load(config, taken)
        targets = theirs.targets(case, model)
        adapters = initial_adapters(targets)
        if nudge:
            draw = np.random.default_rng(nudge)
            for values in adapters.values():
                for key, value in values.items():
                    values[key] = (value * (1 + 1e-7 * draw.standard_normal(value.shape))).astype(np.float32)
        routes = theirs.Routes(model)
        parameters = theirs.adapt(case, model, adapters)
        initial = theirs.values(parameters)
        losses = theirs.train(case, model, parameters)
    return Reference(config, weights, targets, losses, initial, theirs.values(parameters), routes.nearest)


def compare(case: Case, theirs_run: Reference) -> Difference:
    """Run deltatune from the same start and say how far it ends from transformers, whole adapters compared."""
    losses, final = ours.run(case, theirs_run.config, theirs_run.weights, initial_adapters(theirs_run.targets))
    gaps = np.abs(np.subtract(losses, theirs_run.losses))
    worst, tensor = 0.0, ""
    for path, values in theirs_run.final.items():
        for key, value in values.items():
            way = np.linalg.norm(value - theirs_run.initial[path][key])
            relative = float(np.linalg.norm(final[path][key] - value) / way)
            if not relative <= worst:
                worst, tensor = relative, f"{path}.{key}"
    step = int(np.argmax(gaps))
    return Difference(float(gaps[step]), step, worst, tensor)


def nudged(case: Case, base: Reference) -> float:
    """How far transformers drifts from itself, in loss, when its initial adapters move by 1e-7: two draws."""
    drifts = [np.abs(np.subtract(reference(case, draw).losses, base.losses)).max() for draw in (1, 2)]
    return float(max(drifts))


def record(name: str, case: Case) -> tuple[Reference, float]:
    """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
    base = reference(case)
    drift = nudged(case, base)
    if base.fall < FALL or drift > NUDGED_LIMIT or base.nearest_route < ROUTE_LIMIT:
        raise ValueError(
            f"{name}: loss fell by {base.fall:.0%}, drifts by {drift:.1e} from itself, comes within "
            f"{base.nearest_route:.1e} of another route: take another `draw`."
        )
    recording.write(
        name,
        {
            "date": datetime.date.today().isoformat(),
            "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
            "nudged": drift,
            "nearest_route": None if base.nearest_route == float("inf") else base.nearest_route,
            "config": base.config,
            "shapes": {key: value.shape for key, value in base.weights.items()},
            "targets": base.targets,
            "checksums": recording.checksums(base.weights),
            "losses": base.losses,
            "adapters": {key: vars(value) for key, value in recording.summary(base.initial, base.final).items()},
        },
    )
    return base, drift
