"""TRL beside deltatune on distillation, run live. `make oracle`; fails where trl is absent."""

from __future__ import annotations

import functools

import pytest
from parity.distilled import CASES, checksums

from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import FALL, NUDGED_LIMIT

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers, PEFT and TRL.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@functools.cache
def reference(name: str):
    from parity import distilled_theirs

    return distilled_theirs.reference(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_losses_and_adapters_of_trl(name):
    from parity import distilled_theirs

    run = reference(name)
    assert run.fall >= FALL
    found = distilled_theirs.compare(CASES[name], run)
    assert found.small, found


@pytest.mark.parametrize("name", CASES)
def test_trl_still_gives_the_recorded_numbers(name):
    run = reference(name)
    recorded = recording.read(f"distilled/{name}")
    assert run.targets == recorded.targets
    assert checksums(CASES[name], run.weights) == recorded.checksums
    found = recorded.compare(run.run)
    assert found.small, found


def test_rounding_alone_stays_far_below_the_tolerance():
    from parity import distilled_theirs

    assert distilled_theirs.nudged(CASES["reverse"], reference("reverse")).adapter <= NUDGED_LIMIT
