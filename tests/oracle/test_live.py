"""transformers, PEFT and TRL beside deltatune, run live. `make oracle`; fails where one of them is absent."""

import functools
import importlib
from typing import Any

import numpy as np
import pytest
from parity import ahead, distilled, pairs, rollouts, updates

from deltatune.selftest.parity import cases, recording, vision
from deltatune.selftest.parity.cases import FALL, NUDGED_LIMIT, ROUTE_LIMIT
from deltatune.train.rollouts import rollout_order

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


@pytest.mark.parametrize("name", rollouts.CASES)
def test_trl_gives_the_recorded_numbers_and_ours(name):
    from parity.rollouts_theirs import theirs

    live, recorded, ours = (
        theirs(rollouts.CASES[name]),
        vars(rollouts.recorded()[name]),
        rollouts.ours(rollouts.CASES[name]),
    )
    for key, bound in (("advantages", 2e-6), ("loss", 1e-5), ("gradients", 1e-5)):
        scale = max(np.abs(live[key]).max(), 1.0 if key != "gradients" else 0.0)
        assert np.abs(np.subtract(recorded[key], live[key])).max() <= 1e-6 * scale
        assert np.abs(np.subtract(ours[key], live[key])).max() <= bound * scale


@pytest.mark.parametrize("name", updates.CASES)
def test_thirty_updates_give_the_losses_and_adapters_of_trl(name):
    from parity.updates_theirs import compare

    difference, base = compare(updates.CASES[name])
    # A loss of 0 in every step would compare nothing.
    assert max(map(abs, base.run.losses)) > 0.01
    assert max(difference.loss, difference.gradient, difference.adapter) <= 1e-4, difference


def test_a_planted_fault_shows(monkeypatch):
    """The second pass takes its own log-probabilities for those before the first."""
    from parity.updates_theirs import compare

    monkeypatch.setattr(rollout_order, "needs_old", lambda config: False)
    assert compare(updates.CASES["two passes"])[0].adapter > 1e-3
