import math
import time
from types import SimpleNamespace

import pytest

from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.search import Largest, Values, largest

PEAKS = {
    "linear": lambda v: 1_000 + 37 * v,
    "quadratic": lambda v: 5_000 + 3 * v + 2 * v * v,
    "steps": lambda v: 1_000 + 500 * (v // 7),
    "flat": lambda v: 1_000,
}


def planned(peak, buffers=lambda v: 10, seconds=lambda v: 0.0):
    tried = []

    def attempt(value):
        tried.append(value)
        moment = SimpleNamespace(amount=peak(value)), SimpleNamespace(amount=buffers(value))
        return SimpleNamespace(bytes=moment[0], buffers=moment[1], seconds=seconds(value))

    return attempt, tried


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("limit", [1_200, 9_000, 400_000])
@pytest.mark.parametrize("step", [1, 32])
def test_finds_the_largest_that_fits_within_a_fiftieth(name, limit, step):
    peak, most = PEAKS[name], 4096
    attempt, tried = planned(peak)
    found = largest(attempt, DeviceLimits(None, limit, "", ""), {}, Values(step, most))
    best = max((v for v in range(step, most + 1, step) if peak(v) <= limit), default=0)
    assert found.value <= best
    assert best - found.value <= max(step, best / 49), (found, best, tried)
    assert found.more == (best == most)
    assert len(tried) <= 10
    assert all(value % step == 0 and 0 < value <= most for value in tried)


def test_both_limits_count():
    attempt, _ = planned(lambda v: v, buffers=lambda v: 3 * v)
    assert largest(attempt, DeviceLimits(300, 1_000, "", ""), {}, Values(1, 5_000)).value == 100


def test_known_value_is_not_planned_again():
    attempt, tried = planned(PEAKS["linear"])
    known = {8: attempt(8)}
    tried.clear()
    largest(attempt, DeviceLimits(None, 10_000, "", ""), known, Values(1, 4096))
    assert 8 not in tried


def soon(known, peak=PEAKS["linear"], limit=9_000, *, within=6.0, most=4096, leap=4, **options):
    """The results and trials of a search, from plans that took a tenth of a second for each unit of their value."""
    attempt, tried = planned(peak, seconds=lambda v: v / 10)
    plans = {value: attempt(value) for value in known}
    options["alike"] = {value: attempt(value) for value in options.get("alike", ())}
    tried.clear()
    options = {"deadline": time.monotonic() + within} | options
    return largest(attempt, DeviceLimits(None, limit, "", ""), plans, Values(1, most, leap), **options), tried


def test_no_plan_takes_longer_than_there_is_time():
    """The smaller plan tells how memory grows; where the limit is met, 216, is then named without its plan."""
    assert soon([100]) == (Largest(100, more=False, probable=216), [50])
    assert soon([100], limit=10**9) == (Largest(100, more=True, probable=400), [50])
    assert soon([216, 100]) == (Largest(216, more=False), [])
    assert soon([100], within=0) == (Largest(100, more=True), [])
    assert soon([400], within=0) == (Largest(0, more=True), [])


def test_a_larger_plan_is_made_where_there_is_time():
    found, tried = soon([10], within=30.0)
    assert tried[0] == 40
    assert found.value >= 212
    found, tried = soon([10], limit=10**9, within=3.5)
    assert tried == [20]
    assert found == Largest(20, more=True, probable=80)


def test_plans_of_the_same_memory_help_to_guess():
    assert soon([100], alike=[50.0]) == (Largest(100, more=False, probable=216), [])
    assert soon([400], alike=[50.0], within=0) == (Largest(0, more=False, probable=216), [])
    assert soon([400], limit=15_799, alike=[50.0], within=0) == (Largest(0, more=False, probable=399), [])


def test_values_below_one_that_does_not_fit_are_guessed_at_once():
    assert soon([2048], within=math.inf)[1][:2] == [1, 216]


def test_how_much_slower_plans_become_can_be_told():
    found, tried = soon([8], limit=10**9, most=256, leap=256, slower=lambda times: 1.0)
    assert (found, tried) == (Largest(256, more=True), [256])


def test_one_plan_is_made_where_none_is_known():
    assert soon([], within=0)[1] == [1]
