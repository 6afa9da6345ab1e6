import json
from itertools import islice

import numpy as np
import pytest

from deltatune import errors
from deltatune.data import Batch, BatchOrder
from deltatune.data.batches.order import PeekableOrder

SIZES = [5, 40, 33, 34, 70, 12, 9, 100, 35, 64, 65, 20, 21, 90, 7, 50, 51, 30, 31]


def same(left: Batch, right: Batch) -> bool:
    arrays = all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("inputs", "targets", "weights", "segments")
    )
    return arrays and left.sources == right.sources


def sources(batches) -> list[str]:
    return [source for batch in batches for row in batch.sources for source in row]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 4, 6, 19])
def test_each_epoch_gives_every_example_once(examples_of, packed, size):
    order = BatchOrder(examples_of(SIZES), min(size, 5) if packed else size, 128, packed=packed)
    expected = sorted(f"data:{number + 1}" for number in range(len(SIZES)))
    for _ in range(3):
        batches = list(islice(order, order.batches_per_epoch))
        assert sorted(sources(batches)) == expected


def test_epochs_differ_in_order_and_in_composition(examples_of):
    order = BatchOrder(examples_of([20] * 16), 4, 128)
    first = [frozenset(sources([batch])) for batch in order.epoch(0)]
    second = [frozenset(sources([batch])) for batch in order.epoch(1)]
    assert set(first) != set(second)


def test_widths_are_buckets_and_rows_of_like_length_go_together(examples_of):
    order = BatchOrder(examples_of(SIZES), 3, 128)
    widths = [batch.inputs.shape for batch in order.epoch(0)]
    assert {rows for rows, _ in widths} == {3}
    assert {width for _, width in widths} <= set(order.widths) == {32, 64, 96, 128}
    # At each of the three changes of width, at most two rows share a batch with longer ones; two rows are blank.
    padded = sum(3 * width for _, width in widths)
    assert padded <= sum(-(-(size - 1) // 32) * 32 for size in SIZES) + (3 * 2 + 2) * 32


def test_the_incomplete_batch_holds_the_shortest_rows_and_blanks(examples_of):
    order = BatchOrder(examples_of(SIZES), 4, 128)
    blank = [batch for batch in order.epoch(0) if () in batch.sources]
    assert len(blank) == 1
    assert [len(row) for row in blank[0].sources] == [1, 1, 1, 0]
    assert blank[0].inputs.shape == (4, 32)
    assert not blank[0].weights[3].any()


def test_short_and_long_batches_are_mixed(examples_of):
    order = BatchOrder(examples_of([20] * 40 + [100] * 40), 4, 128)
    widths = [batch.inputs.shape[1] for batch in order.epoch(0)]
    assert widths not in (sorted(widths), sorted(widths, reverse=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4, 5, 13])
def test_resumed_it_gives_the_same_batches(examples_of, packed, after):
    def fresh() -> BatchOrder:
        return BatchOrder(examples_of(SIZES), 4, 128, seed=3, packed=packed)

    straight = fresh()
    list(islice(straight, after))
    state = json.loads(json.dumps(straight.state()))
    resumed = fresh()
    resumed.restore(state)
    assert all(same(a, b) for a, b in zip(islice(straight, 12), islice(resumed, 12), strict=True))
    assert resumed.state() == straight.state()


def test_one_pass_does_not_move_the_place(examples_of):
    order, other = (BatchOrder(examples_of(SIZES), 4, 128) for _ in range(2))
    next(order), next(other)
    list(order.epoch(0))
    assert same(next(order), next(other))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batches_of_one_worker(examples_of, packed, world):
    whole = BatchOrder(examples_of(SIZES), 4, 128, packed=packed)
    parts = [BatchOrder(examples_of(SIZES), 4, 128, packed=packed, rank=rank, world=world) for rank in range(world)]
    for batch, *shares in islice(zip(whole, *parts, strict=False), 11):
        for rank, share in enumerate(shares):
            np.testing.assert_array_equal(share.inputs, batch.inputs[rank::world])
            np.testing.assert_array_equal(share.weights, batch.weights[rank::world])
            assert share.sources == batch.sources[rank::world]


def test_seeds_give_orders_of_their_own(examples_of):
    first, second = (sources(BatchOrder(examples_of(SIZES), 4, 128, seed=seed).epoch()) for seed in (0, 1))
    assert first != second
    assert len(sources(BatchOrder(examples_of(SIZES), 4, 128, seed=-1).epoch())) == len(SIZES)


def test_a_state_of_other_data_or_options_is_refused(examples_of):
    state = BatchOrder(examples_of(SIZES), 4, 128).state()
    with pytest.raises(errors.UserError, match="batch_size was 4"):
        BatchOrder(examples_of(SIZES), 2, 128).restore(state)
    with pytest.raises(errors.UserError, match="the training data are not those"):
        BatchOrder(examples_of(SIZES, seed=1), 4, 128).restore(state)
    changed = examples_of(SIZES)
    changed[3].tokens[5] += 1
    with pytest.raises(errors.UserError, match="the training data are not those"):
        BatchOrder(changed, 4, 128).restore(state)
    with pytest.raises(errors.UserError, match="seed was 0"):
        BatchOrder(examples_of(SIZES), 4, 128, seed=1).restore(state)


def test_bad_sizes_are_refused(examples_of):
    with pytest.raises(errors.UserError, match=r"multiple of the number of workers, 2.*use 2"):
        BatchOrder(examples_of(SIZES), 3, 128, world=2)
    with pytest.raises(errors.UserError, match="no examples"):
        BatchOrder([], 3, 128)
    with pytest.raises(ValueError, match="data:8: 99 positions"):
        BatchOrder(examples_of(SIZES), 3, 64)


class Counting:
    def __init__(self, broken=None):
        self.at, self.broken = 0, broken

    def __next__(self):
        if self.at == self.broken:
            self.broken = None
            raise errors.UserError("a bad row")
        self.at += 1
        return self.at

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


def test_a_batch_is_shown_once_and_then_taken():
    order = PeekableOrder(Counting())
    assert next(order) == 1
    assert (order.peek(), order.peek()) == (2, 2)
    assert order.state() == {"at": 1}
    assert (next(order), order.state()) == (2, {"at": 2})
    assert next(order) == 3


def test_going_back_forgets_what_was_shown():
    order = PeekableOrder(Counting())
    order.peek()
    order.restore(order.state(), {})
    assert (next(order), next(order)) == (1, 2)
    order.peek()
    order.restore({"at": 7}, {})
    assert next(order) == 8


def test_a_batch_that_cannot_be_had_says_so_when_it_is_taken():
    order = PeekableOrder(Counting(broken=1))
    assert next(order) == 1
    assert order.peek() is None
    assert order.peek() is None
    assert order.state() == {"at": 1}
    with pytest.raises(errors.UserError, match="a bad row"):
        next(order)
    assert next(order) == 2
