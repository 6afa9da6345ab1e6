"""transformers + PEFT beside deltatune on images and videos, run live. `make oracle`."""

from __future__ import annotations

import functools

import pytest

from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import FALL, NUDGED_LIMIT, ROUTE_LIMIT
from deltatune.selftest.parity.vision import CASES, checksums

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers and PEFT.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]


@functools.cache
def reference(name: str):
    from parity import vision_record

    return vision_record.reference(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_losses_and_adapters_of_transformers(name):
    from parity import vision_record

    run = reference(name)
    assert run.fall >= FALL
    assert run.nearest_route >= ROUTE_LIMIT
    found = vision_record.compare(CASES[name], run)
    assert found.small, found


@pytest.mark.parametrize("name", CASES)
def test_transformers_still_gives_the_recorded_numbers(name):
    run = reference(name)
    recorded = recording.read(f"vision/{name}")
    assert run.targets == recorded.targets
    assert checksums(run.weights, CASES[name].videos) == recorded.checksums
    found = recorded.compare(run.run)
    assert found.small, found


@pytest.mark.parametrize("name", CASES)
def test_rounding_alone_stays_far_below_the_tolerance(name):
    from parity import vision_record

    assert vision_record.nudged(CASES[name], reference(name)).adapter <= NUDGED_LIMIT
