"""Live runs: transformers against deltatune, and the recordings made from them. Needs torch."""

import contextlib
import datetime
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltatune.selftest.parity import ours, recording
from deltatune.selftest.parity.cases import (
    CASES,
    FALL,
    NUDGED_LIMIT,
    ROUTE_LIMIT,
    Adapters,
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


class Comparison:
    """Training on text on both sides. Another kind of training overrides its own part.

    A recording, a file of `folder`, depends on `packages`. `ours` runs a case from config.json, weights and adapters.
    """

    folder = ""
    cases: dict[str, Any] = CASES
    packages: tuple[str, ...] = PACKAGES
    ours: Callable[..., ParityRun] = staticmethod(ours.run)

    def family(self, case: Any) -> Any:
        """The owner of the drawn weights and the learning rate of a case, or of its model."""
        return getattr(case, "model", case).family

    def layout(self, case: Any) -> tuple[Config, dict[str, tuple[int, ...]]]:
        family = self.family(case)
        return theirs.saved(family.model_type, family.options)

    def computed_with(self, case: Any, config: Config, weights: Weights) -> Weights:
        """The weights with which both sides really compute."""
        if getattr(case, "bits", None) is None:
            return weights
        return quantised.dequantised(ours.load(case, config, weights), weights, config)

    def load(self, config: Config, weights: Weights) -> torch.nn.Module:
        return theirs.load(config, weights)

    def targets(self, case: Any, model: torch.nn.Module) -> dict[str, tuple[int, int]]:
        return theirs.targets(model, self.family(case).not_adapted)

    def loss(self, case: Any, model: torch.nn.Module, start: Reference) -> Callable[[int], torch.Tensor]:
        """Return the function that computes the loss of a step, by its index."""
        return lambda step: theirs.text_loss(model, step)

    def checksums(self, case: Any, weights: Weights) -> dict[str, str]:
        """Checksums of the start that both sides share."""
        return recording.checksums(weights)

    def reference(self, case: Any, nudge: int = 0) -> Reference:
        """Run transformers and PEFT. nudge: a seed that moves every weight by about 1e-7 of itself."""
        config, shapes = self.layout(case)
        weights = self.family(case).weights(shapes)
        taken = self.computed_with(case, config, weights)
        with one_thread():
            model = self.load(config, moved(taken, nudge) if nudge else taken)
            targets = self.targets(case, model)
            routes = theirs.Routes(model)
            parameters = theirs.adapt(model, initial_adapters(targets), dora=getattr(case, "dora", False))
            start = Reference(config, weights, targets, theirs.copied(parameters), ParityRun([], {}, {}), np.inf)
            loss = self.loss(case, model, start)
            run = theirs.train(loss, model, parameters, self.family(case).learning_rate)
        return Reference(config, weights, targets, start.initial, run, routes.nearest)

    def compare(self, case: Any, base: Reference) -> Difference:
        """Run deltatune from the same start and say how far it is from the reference."""
        return difference(base, self.ours(case, base.config, base.weights, initial_adapters(base.targets)))

    def nudged(self, case: Any, base: Reference) -> Difference:
        """How far the reference drifts from itself when its weights move a little: the largest of 3 draws."""
        drifts = [difference(base, self.reference(case, draw).run) for draw in (1, 2, 3)]
        return max(drifts, key=lambda drift: drift.adapter)

    def record(self, name: str) -> tuple[Reference, Difference]:
        """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
        base = self.reference(self.cases[name])
        drift = self.nudged(self.cases[name], base)
        if base.fall < FALL or drift.adapter > NUDGED_LIMIT or base.nearest_route < ROUTE_LIMIT:
            raise ValueError(
                f"{name}: loss falls by {base.fall:.0%}, adapters drift by {drift.adapter:.1e}, comes within "
                f"{base.nearest_route:.1e} of another route: take another `draw`."
            )
        recording.write(
            f"{self.folder}{name}",
            {
                "date": datetime.date.today().isoformat(),
                "versions": {package: importlib.metadata.version(package) for package in self.packages},
                "nudged": {"loss": drift.loss, "gradient": drift.gradient, "adapter": drift.adapter},
                "nearest_route": None if base.nearest_route == np.inf else base.nearest_route,
                "config": base.config,
                "shapes": {key: value.shape for key, value in base.weights.items()},
                "targets": base.targets,
                "checksums": self.checksums(self.cases[name], base.weights),
                "losses": base.run.losses,
                "gradients": recording.summary(base.run.gradients),
                "adapters": recording.summary(base.run.final, base.initial),
            },
        )
        return base, drift


TEXT = Comparison()


def moved(weights: Weights, seed: int) -> Weights:
    """Every weight moved by about 1e-7 of itself."""
    draw = np.random.default_rng(seed)
    return {
        name: (value * (1 + 1e-7 * draw.standard_normal(value.shape))).astype(np.float32)
        for name, value in weights.items()
    }


def difference(reference: Reference, run: ParityRun) -> Difference:
    """How far a run is from the reference, whole tensors compared."""
    gaps = np.abs(np.subtract(run.losses, reference.run.losses))
    step = int(np.argmax(gaps))
    return Difference(
        float(gaps[step]),
        step,
        *_worst(run.gradients, reference.run.gradients, {}),
        *_worst(run.final, reference.run.final, recording.flat(reference.initial)),
    )


def _worst(found: Adapters, expected: Adapters, starts: dict[str, np.ndarray]) -> tuple[float, str]:
    ours_flat, theirs_flat = recording.flat(found), recording.flat(expected)
    errors = {
        name: float(np.linalg.norm(ours_flat[name] - value) / np.linalg.norm(value - starts.get(name, 0.0)))
        for name, value in theirs_flat.items()
    }
    name = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return errors[name], name
