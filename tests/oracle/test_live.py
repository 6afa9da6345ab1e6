"""transformers, PEFT and TRL beside deltatune, run live. `make oracle`; fails where one of them is absent."""

import functools
import importlib
from typing import Any

import pytest
from parity import ahead, distilled, pairs

from deltatune.selftest.parity import cases, recording, vision
from deltatune.selftest.parity.cases import FALL, NUDGED_LIMIT, ROUTE_LIMIT

pytestmark = pytest.mark.oracle

# By the kind of training, the module and the name of its comparison, and the cases.
KINDS = {
    "text": ("record", "TEXT", cases.CASES),
    "images": ("vision_theirs", "COMPARISON", vision.CASES),
    "preferences": ("pairs_theirs", "COMPARISON", pairs.CASES),
    "distillation": ("distilled_theirs", "COMPARISON", distilled.CASES),
    "heads": ("ahead_theirs", "COMPARISON", ahead.CASES),
}
CASES = [(kind, name) for kind, (*_, of_kind) in KINDS.items() for name in of_kind]
RECORDED = [(kind, name) for kind, name in CASES if getattr(KINDS[kind][2][name], "recorded", True)]
# The divergences of distillation round alike.
NUDGED = [(kind, name) for kind, name in RECORDED if kind != "distillation" or name == "reverse"]


def comparison(kind: str) -> Any:
    module, name, _ = KINDS[kind]
    return getattr(importlib.import_module(f"parity.{module}"), name)


@functools.cache
def reference(kind: str, name: str) -> Any:
    return comparison(kind).reference(KINDS[kind][2][name])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_training_gives_the_losses_and_adapters_of_the_reference(kind, name):
    run = reference(kind, name)
    assert run.fall >= FALL
    assert run.nearest_route >= ROUTE_LIMIT
    found = comparison(kind).compare(KINDS[kind][2][name], run)
    assert found.small, found


@pytest.mark.parametrize(("kind", "name"), RECORDED)
def test_the_reference_still_gives_the_recorded_numbers(kind, name):
    run, side = reference(kind, name), comparison(kind)
    recorded = recording.read(f"{side.folder}{name}")
    if kind == "text":
        assert run.config == recorded.config | {"transformers_version": run.config["transformers_version"]}
    assert run.targets == recorded.targets
    assert side.checksums(KINDS[kind][2][name], run.weights) == recorded.checksums
    found = recorded.compare(run.run)
    assert found.small, found


@pytest.mark.parametrize(("kind", "name"), NUDGED)
def test_rounding_alone_stays_far_below_the_tolerance(kind, name):
    assert comparison(kind).nudged(KINDS[kind][2][name], reference(kind, name)).adapter <= NUDGED_LIMIT
