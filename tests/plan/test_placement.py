"""Tests which layers a bounded run leaves on the disk, and its lines on them."""

from itertools import pairwise
from pathlib import Path

import mlx.nn as nn
import pytest

from deltatune.plan.layers_on_disk import held, left_on_disk, spread
from deltatune.plan.placement import Placement
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
