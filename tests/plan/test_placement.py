"""Tests which layers a bounded run leaves on the disk, and the search for the largest batch and row."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
import pytest

from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.placement import Placement
from deltatune.plan.search import Largest, held, largest, left_on_disk, spread
from deltatune.train.by_layer.layer_functions import lowest_layer


@pytest.mark.parametrize("count", [1, 2, 7, 24, 40])
def test_layers_that_stay_are_spread_evenly(count):
    for resident in range(1, count + 1):
        streamed = spread(count, resident)
        assert len(streamed) == count - resident
        kept = [at for at in range(count) if at not in streamed]
        gaps = [after - before for before, after in pairwise(kept)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_as_few_layers_as_the_memory_asks_for_are_on_the_disk():
    layers, peak = [10] * 8, 100
    assert left_on_disk(peak, layers, 100) == ()
    # Two layers on the disk are in memory all the same.
    assert left_on_disk(peak, layers, 99) == spread(8, 5)
    assert left_on_disk(peak, layers, 70) == spread(8, 3)
    assert left_on_disk(peak, layers, 40) == tuple(range(8))
    assert left_on_disk(peak, layers, 39) is None


def test_the_largest_layers_on_the_disk_are_those_in_memory():
    assert held(100, [10, 30, 20, 5], [0, 1, 2]) == 100 - 60 + 50


def test_bytes_that_an_iteration_reads():
    def read(streamed, lowest=0):
        return Placement(0, 0, (1, 1), (10,) * 6, lowest, streamed, Path()).read

    # The turning point is read once, and the layer at which the backward pass ends begins the next forward pass.
    assert read((0, 1, 2, 3, 4, 5)) == 100
    assert read((1, 4)) == 20
    # The backward pass ends above the lowest layers, which the forward pass reads each time.
    assert read((0, 1, 2, 3, 4, 5), lowest=2) == 90
    assert read((0, 1), lowest=2) == 20
    # Without a backward pass, every pass reads everything.
    assert read((0, 1, 2), lowest=6) == 30
    assert read((3,)) == 0
    assert read(()) == 0


def test_where_the_backward_pass_ends():
    model = nn.Module()
    model.embedding, model.layers = nn.Embedding(4, 2), [nn.Linear(2, 2) for _ in range(3)]
    paths = [f"layers.{index}" for index in range(3)]
    model.freeze()
    assert lowest_layer(model, paths) == 3
    model.layers[1].unfreeze()
    model.layers[2].unfreeze()
    assert lowest_layer(model, paths) == 1
    model.embedding.unfreeze()
    assert lowest_layer(model, paths) == 0


PEAKS = {
    "linear": lambda v: 1_000 + 37 * v,
    "quadratic": lambda v: 5_000 + 3 * v + 2 * v * v,
    "steps": lambda v: 1_000 + 500 * (v // 7),
    "flat": lambda v: 1_000,
}


def planned(peak, buffers=lambda v: 10, saved=lambda v: 0):
    tried = []

    def attempt(value):
        tried.append(value)
        moment = SimpleNamespace(amount=peak(value)), SimpleNamespace(amount=buffers(value))
        return SimpleNamespace(bytes=moment[0], buffers=moment[1], saved=saved(value))

    return attempt, tried


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("limit", [1_200, 9_000, 400_000])
@pytest.mark.parametrize("step", [1, 32])
def test_finds_the_largest_that_fits_within_a_fiftieth(name, limit, step):
    peak, most = PEAKS[name], 4096
    attempt, tried = planned(peak)
    found = largest(attempt, DeviceLimits(None, limit, "", ""), {}, range(step, most + 1, step))
    best = max((v for v in range(step, most + 1, step) if peak(v) <= limit), default=0)
    assert found.value <= best
    # The memory of steps is that of seven values.
    assert best - found.value <= max(step, best / 49, 7 * (name == "steps")), (found, best, tried)
    assert found.more == (best == most)
    assert len(tried) <= 10
    assert all(value % step == 0 and 0 < value <= most for value in tried)


def test_both_limits_count():
    attempt, _ = planned(lambda v: v, buffers=lambda v: 3 * v)
    assert largest(attempt, DeviceLimits(300, 1_000, "", ""), {}, range(1, 5_001)).value == 100


def test_two_plans_are_enough_where_the_memory_without_tokens_is_known():
    """The second plan is as foreseen, and the place where the limit is met is near."""
    attempt, tried = planned(PEAKS["linear"])
    fixed, known = attempt(0), {100: attempt(100)}
    tried.clear()
    limits = DeviceLimits(None, 100_000, "", "")
    assert largest(attempt, limits, known, range(1, 4097), fixed) == Largest(2648, more=False)
    assert tried == [2648]
    assert largest(attempt, DeviceLimits(None, 10**9, "", ""), known, range(1, 4097), fixed) == Largest(4096, more=True)
    assert tried == [2648, 4096]


@pytest.mark.parametrize(("limit", "planned_too"), [(3_700, [2]), (3_950, [2, 3])])
def test_a_value_that_takes_too_much_by_far_is_not_planned(limit, planned_too):
    """Of few values, each takes much more than the one before; the second is not foreseen here."""
    attempt, tried = planned(lambda v: 1_000 + 1_000 * v + 200 * (v > 0))
    fixed, known = attempt(0), {1: attempt(1)}
    tried.clear()
    assert largest(attempt, DeviceLimits(None, limit, "", ""), known, range(1, 100), fixed) == Largest(2, more=False)
    assert tried == planned_too


def test_memory_that_bends_down_is_not_searched_from_the_largest_value():
    """A long row is traced in pieces, whose memory a token is less than that of a short row."""
    attempt, tried = planned(lambda v: 1_680 + (4.4 * v if v < 3_000 else 4_200 + 3.0 * v))
    fixed, known = attempt(0), {2048: attempt(2048)}
    tried.clear()
    found = largest(attempt, DeviceLimits(None, 25_280, "", ""), known, range(32, 262_145, 32), fixed)
    assert 6_300 <= found.value <= 6_466
    assert len(tried) <= 4, tried


def test_memory_that_falls_at_one_place_is_not_taken_to_fall_for_ever():
    """From some length on, rows are cut into other pieces."""
    attempt, tried = planned(lambda v: 1_700 + 0.35 * v if v < 65_000 else 1_700 + 0.31 * v)
    fixed, known = attempt(0), {2048: attempt(2048), 62_528: attempt(62_528)}
    tried.clear()
    found = largest(attempt, DeviceLimits(None, 25_280, "", ""), known, range(32, 262_145, 32), fixed)
    assert 0.98 * 76_064 < found.value <= 76_064
    assert len(tried) <= 4, tried


@pytest.mark.parametrize("grows", [31, 48])
@pytest.mark.parametrize("limit", [12_000, 25_280, 60_000])
@pytest.mark.parametrize("first", [8, 40, 90])
def test_a_value_near_a_plan_is_bound_to_fit_and_not_planned(grows, limit, first):
    """A part of memory does not grow with the value. Of what does, saved tensors are a part, which is known."""
    attempt, tried = planned(lambda v: 1_680 + 900 * (v > 0) + (49 + grows) * v, saved=lambda v: 49 * v)
    fixed, known = attempt(0), {first: attempt(first)}
    tried.clear()
    found = largest(attempt, DeviceLimits(None, limit, "", ""), known, range(1, 4097), fixed).value
    best = (limit - 2_580) // (49 + grows)
    assert 0.98 * best - 1 <= found <= best, (found, best, tried)
    assert len(tried) <= 2, tried


def test_no_values_are_none():
    limits, none = DeviceLimits(None, 1, "", ""), Largest(0, more=False)
    assert largest(None, limits, {}, range(1, 1)) == none
    assert largest(None, limits, {}, range(1, 9), planned(PEAKS["linear"])[0](0)) == none
