"""TRL beside deltatune on preferences, run live. `make oracle`; fails where trl is absent."""

from __future__ import annotations

import functools

import pytest
from parity.pairs import CASES, checksums

from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import FALL, NUDGED_LIMIT

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers, PEFT and TRL.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
RECORDED = [name for name, case in CASES.items() if case.recorded]


@functools.cache
def reference(name: str):
    from parity import pairs_record

    return pairs_record.reference(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_losses_and_adapters_of_trl(name):
    from parity import pairs_record

    run = reference(name)
    assert run.fall >= FALL
    found = pairs_record.compare(CASES[name], run)
    assert found.small, found


@pytest.mark.parametrize("name", RECORDED)
def test_trl_still_gives_the_recorded_numbers(name):
    run = reference(name)
    recorded = recording.read(f"pairs/{name}")
    assert run.targets == recorded.targets
    assert checksums(run.weights) == recorded.checksums
    found = recorded.compare(run.run)
    assert found.small, found


@pytest.mark.parametrize("name", RECORDED)
def test_rounding_alone_stays_far_below_the_tolerance(name):
    from parity import pairs_record

    assert pairs_record.nudged(CASES[name], reference(name)).adapter <= NUDGED_LIMIT
