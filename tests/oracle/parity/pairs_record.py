"""Live runs on preferences, and the recordings made from them. Needs torch and TRL."""

from __future__ import annotations

from deltatune.selftest.parity.cases import initial_adapters
from deltatune.selftest.parity.recording import Difference

from . import pairs, pairs_ours, pairs_theirs, theirs
from . import record as text_record
from .pairs import PairCase
from .record import Reference, difference, moved, one_thread


def reference(case: PairCase, nudge: int = 0) -> Reference:
    """Run TRL on transformers and PEFT. nudge: a seed that moves every weight by about 1e-7 of itself."""
    config, shapes = theirs.layout(case.model)
    weights = taken = case.model.family.weights(shapes)
    if nudge:
        taken = moved(taken, nudge)
    with one_thread():
        model = theirs.load(config, taken)
        targets = theirs.targets(case.model, model)
        parameters = theirs.adapt(case.model, model, initial_adapters(targets))
        initial = theirs.copied(parameters)
        run = pairs_theirs.train(case, model, parameters)
    return Reference(config, weights, targets, initial, run, float("inf"))


def compare(case: PairCase, base: Reference) -> Difference:
    """Run deltatune from the same start and say how far it is from TRL."""
    return difference(base, pairs_ours.run(case, base.config, base.weights, initial_adapters(base.targets)))


def nudged(case: PairCase, base: Reference) -> Difference:
    """How far TRL drifts from itself when its weights move a little."""
    return text_record.nudged(case, base, reference)


def record(name: str, case: PairCase) -> tuple[Reference, Difference]:
    """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
    base = reference(case)
    drift = nudged(case, base)
    packages = (*text_record.PACKAGES, "trl")
    text_record.write(f"pairs/{name}", base, drift, pairs.checksums(base.weights), packages)
    return base, drift
