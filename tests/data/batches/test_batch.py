"""Batches: their widths and padding, documents packed into rows, and how they are shown."""

import io
import itertools
import json
from itertools import islice

import numpy as np
import pytest
from rich.console import Console

from deltatune import errors
from deltatune.data import Batch, BatchOrder, bucket_widths, collate, load_datasets, pack, show_batch
from deltatune.data.batches.order import PeekableOrder
from deltatune.data.batches.show import printable


@pytest.mark.parametrize("limit", [2, 16, 31, 32, 33, 100, 256, 257, 300, 512, 2048, 4096, 5000, 32768, 262144])
def test_widths_are_few_ascending_and_end_at_the_limit(limit):
    widths = bucket_widths(limit)
    assert widths == sorted(set(widths))
    assert widths[-1] == limit
    assert len(widths) <= 16
    assert all(width % 32 == 0 for width in widths[:-1])
    assert limit > 32768 or all(high <= 2 * low for low, high in itertools.pairwise(widths))


def test_shifted_by_one_with_weights_where_targets_count(examples_of):
    example, other = examples_of([6, 3])
    batch = collate([[example], [other], []], 8, packed=False)
    assert batch.inputs.dtype == batch.targets.dtype == np.int32
    assert batch.weights.dtype == np.float32
    assert batch.inputs.shape == batch.targets.shape == batch.weights.shape == (3, 8)
    assert batch.segments is None
    np.testing.assert_array_equal(batch.inputs[0], [*example.tokens[:-1], 0, 0, 0])
    np.testing.assert_array_equal(batch.targets[0], [*example.tokens[1:], 0, 0, 0])
    np.testing.assert_array_equal(batch.weights[0], [*example.targets[1:], 0, 0, 0])
    assert not batch.weights[2].any()
    assert batch.sources == (("data:1",), ("data:2",), ())
    assert batch.positions == ((5,), (2,), ())


def test_packed_rows_keep_documents_apart(examples_of):
    documents = examples_of([5, 3, 4])
    batch = collate([documents, []], 12, packed=True)
    np.testing.assert_array_equal(batch.segments, [[0] * 4 + [1] * 2 + [2] * 3 + [3] * 3, [0] * 12])
    start = 0
    for document in documents:
        alone = collate([[document]], document.positions, packed=False)
        part = slice(start, start + document.positions)
        for name in ("inputs", "targets", "weights"):
            np.testing.assert_array_equal(getattr(batch, name)[0, part], getattr(alone, name)[0])
        start += document.positions
    assert not batch.weights[0, start:].any()
    # Without padding there is no segment of padding.
    np.testing.assert_array_equal(collate([documents[:2]], 6, packed=True).segments, [[0] * 4 + [1] * 2])


def test_every_document_once_and_no_row_too_long():
    random = np.random.default_rng(0)
    sizes = (random.lognormal(4, 1, 500).astype(int) % 256 + 1).tolist()
    rows = pack(sizes, 256)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(sum(sizes[number] for number in row) for row in rows) <= 256
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // 256) + 4


def test_the_best_fitting_row_is_taken():
    assert pack([], 10) == []
    # The rows of 6 and 7 have room for 4 and 3; the 3 goes to the 7, which it fills, though it would fit the 6 too.
    assert pack([6, 7, 3], 10) == [(1, 2), (0,)]
    assert pack([5, 5, 5, 5], 10) == [(0, 1), (2, 3)]


ROWS = [
    {"prompt": "a [b]question[/b]", "completion": "an \x1b[31manswer ü😀"},
    {"prompt": "one", "completion": "two\nlines"},
]


def shown(tokenizer, config, *, terminal: bool, **console) -> str:
    splits = load_datasets(config, tokenizer)
    order = BatchOrder(splits.train, config.batch_size, config.max_seq_length, packed=config.pack)
    options = {"force_terminal": terminal, "color_system": "standard" if terminal else None} | console
    console = Console(file=io.StringIO(), width=200, **options)
    show_batch(next(order), tokenizer, console)
    return console.file.getvalue()


def test_plain_text_marks_target_tokens(tokenizer, folder):
    config = folder(train=ROWS, batch_size=2)
    text = shown(tokenizer, config, terminal=False)
    assert "First batch: 2 rows of 64 positions. What counts in the loss stands in ⟦ ⟧." in text
    assert f"{config.data}/train.jsonl:1: " in text
    assert "<|im_start|>user\\n\na [b]question[/b]<|im_end|>\\n\n" in text
    assert "⟦an \\x1b[31manswer ü😀⟧⟦<|im_end|>⟧⟦\\n\n⟧" in text
    assert "⟦two\\n\nlines⟧⟦<|im_end|>⟧" in text
    assert "\x1b" not in text
    example = load_datasets(config, tokenizer).train[1]
    assert f"train.jsonl:2: {len(example.tokens)} tokens, {example.targets.sum()} count in the loss" in text


def test_a_terminal_gets_colours_and_no_escape_of_the_datas(tokenizer, folder):
    text = shown(tokenizer, folder(train=ROWS, batch_size=2), terminal=True)
    assert "⟦" not in text
    assert "\x1b[1;32m" in text
    assert "\x1b[31m" not in text
    assert "\\x1b[31manswer" in text
    # TERM=dumb and NO_COLOR ask for brackets.
    for console in ({"color_system": None}, {"no_color": True}):
        text = shown(tokenizer, folder(train=ROWS, batch_size=2), terminal=True, **console)
        assert "⟦two\\n\nlines⟧" in text.replace("\x1b[0m", "")


def test_packed_rows_show_each_document(tokenizer, folder):
    text = shown(tokenizer, folder(train=ROWS, pack=True), terminal=False)
    assert "First batch: 1 row of 64 positions." in text
    assert text.index("row 1: ") < text.index("train.jsonl:1: ")
    assert text.count("row 1: ") == 2
    assert "⟦an \\x1b[31manswer ü😀⟧" in text
    assert "⟦two\\n\nlines⟧" in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("a\tb\r", "a\\tb\\r"), ("\x00\x9b", "\\x00\\x9b"), ("\u202e\u2028", "\\u202e\\u2028"), ("é 漢", "é 漢")],
)
def test_control_and_direction_characters_are_escaped(text, escaped):
    assert printable(text) == escaped


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
    # Short and long batches are mixed.
    order = BatchOrder(examples_of([20] * 40 + [100] * 40), 4, 128)
    widths = [batch.inputs.shape[1] for batch in order.epoch(0)]
    assert widths not in (sorted(widths), sorted(widths, reverse=True))


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
    # One pass for an evaluation does not move the place.
    list(straight.epoch(0))
    assert same(next(straight), next(resumed))


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
    # Going back forgets it.
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
