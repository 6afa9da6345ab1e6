"""Live runs on images and videos, and the recordings made from them. Needs torch."""

from __future__ import annotations

import datetime
import importlib.metadata

import numpy as np

from deltatune.selftest.parity import recording, vision, vision_ours
from deltatune.selftest.parity.cases import FALL, NUDGED_LIMIT, ROUTE_LIMIT, initial_adapters
from deltatune.selftest.parity.recording import Difference
from deltatune.selftest.parity.vision import VisionCase

from . import theirs, vision_theirs
from .record import PACKAGES, Reference, _one_thread, difference


def reference(case: VisionCase, nudge: int = 0) -> Reference:
    """Run transformers and PEFT. nudge: a seed that moves every weight by about 1e-7 of itself."""
    config, shapes = vision_theirs.layout(case)
    weights = taken = case.weights(shapes)
    if nudge:
        draw = np.random.default_rng(nudge)
        taken = {
            name: (value * (1 + 1e-7 * draw.standard_normal(value.shape))).astype(np.float32)
            for name, value in taken.items()
        }
    with _one_thread():
        model = vision_theirs.load(config, taken)
        targets = vision_theirs.targets(model)
        routes = theirs.Routes(model)
        parameters = theirs.adapt(_Plain(), model, initial_adapters(targets))
        initial = theirs.copied(parameters)
        run = vision_theirs.train(case, model, parameters)
    return Reference(config, weights, targets, initial, run, routes.nearest)


class _Plain:
    """What theirs.adapt asks of a case."""

    dora = False


def compare(case: VisionCase, base: Reference) -> Difference:
    """Run deltatune from the same start and say how far it is from transformers."""
    return difference(base, vision_ours.run(case, base.config, base.weights, initial_adapters(base.targets)))


def nudged(case: VisionCase, base: Reference) -> Difference:
    """How far transformers drifts from itself when its weights move by 1e-7 of themselves: the largest of 3 draws."""
    drifts = [difference(base, reference(case, draw).run) for draw in (1, 2, 3)]
    return max(drifts, key=lambda drift: drift.adapter)


def record(name: str, case: VisionCase) -> tuple[Reference, Difference]:
    """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
    base = reference(case)
    drift = nudged(case, base)
    if base.fall < FALL or drift.adapter > NUDGED_LIMIT or base.nearest_route < ROUTE_LIMIT:
        raise ValueError(
            f"{name}: loss falls by {base.fall:.0%}, adapters drift by {drift.adapter:.1e}, comes within "
            f"{base.nearest_route:.1e} of another route: take another `draw`."
        )
    packages = (*PACKAGES, "mlx-vlm")
    recording.write(
        f"vision/{name}",
        {
            "date": datetime.date.today().isoformat(),
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "nudged": {"loss": drift.loss, "gradient": drift.gradient, "adapter": drift.adapter},
            "nearest_route": None if base.nearest_route == float("inf") else base.nearest_route,
            "config": base.config,
            "shapes": {key: value.shape for key, value in base.weights.items()},
            "targets": base.targets,
            "checksums": vision.checksums(base.weights, case.videos),
            "losses": base.run.losses,
            "gradients": recording.summary(base.run.gradients),
            "adapters": recording.summary(base.run.final, base.initial),
        },
    )
    return base, drift
