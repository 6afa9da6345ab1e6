"""Live runs on images and videos, and the recordings made from them. Needs torch."""

from __future__ import annotations

from deltatune.selftest.parity import vision, vision_ours
from deltatune.selftest.parity.cases import initial_adapters
from deltatune.selftest.parity.recording import Difference
from deltatune.selftest.parity.vision import VisionCase

from . import record as text_record
from . import theirs, vision_theirs
from .record import Reference, difference, moved, one_thread


def reference(case: VisionCase, nudge: int = 0) -> Reference:
    """Run transformers and PEFT. nudge: a seed that moves every weight by about 1e-7 of itself."""
    config, shapes = vision_theirs.layout(case)
    weights = taken = case.weights(shapes)
    if nudge:
        taken = moved(taken, nudge)
    with one_thread():
        model = vision_theirs.load(config, taken)
        targets = vision_theirs.targets(model)
        routes = theirs.Routes(model)
        parameters = theirs.adapt(_Plain(), model, initial_adapters(targets))
        initial = theirs.copied(parameters)
        run = vision_theirs.train(case, model, parameters)
    return Reference(config, weights, targets, initial, run, routes.nearest)


class _Plain:
    """The interface of a case for theirs.adapt."""

    dora = False


def compare(case: VisionCase, base: Reference) -> Difference:
    """Run deltatune from the same start and say how far it is from transformers."""
    return difference(base, vision_ours.run(case, base.config, base.weights, initial_adapters(base.targets)))


def nudged(case: VisionCase, base: Reference) -> Difference:
    """How far transformers drifts from itself when its weights move a little."""
    return text_record.nudged(case, base, reference)


def record(name: str, case: VisionCase) -> tuple[Reference, Difference]:
    """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
    base = reference(case)
    drift = nudged(case, base)
    checksums = vision.checksums(base.weights, case.videos)
    text_record.write(f"vision/{name}", base, drift, checksums, (*text_record.PACKAGES, "mlx-vlm"))
    return base, drift
