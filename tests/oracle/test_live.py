"""transformers + PEFT beside deltatune, run live. `make oracle`; fails where torch, transformers or peft is absent."""

from __future__ import annotations

import functools

import pytest

from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import CASES, FALL, NUDGED_LIMIT, ROUTE_LIMIT

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers and PEFT.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]


@functools.cache
def reference(name: str):
    from parity import record

    return record.reference(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_losses_and_adapters_of_transformers(name):
    from parity import record

    run = reference(name)
    assert run.fall >= FALL
    assert run.nearest_route >= ROUTE_LIMIT
    found = record.compare(CASES[name], run)
    assert found.small, found


@pytest.mark.parametrize("name", CASES)
def test_transformers_still_gives_the_recorded_numbers(name):
    run = reference(name)
    recorded = recording.read(name)
    assert run.config == recorded.config | {"transformers_version": run.config["transformers_version"]}
    assert run.targets == recorded.targets
    assert recording.checksums(run.weights) == recorded.checksums
    found = recorded.compare(run.run)
    assert found.small, found


@pytest.mark.parametrize("name", CASES)
def test_rounding_alone_stays_far_below_the_tolerance(name):
    from parity import record

    assert record.nudged(CASES[name], reference(name)).adapter <= NUDGED_LIMIT
