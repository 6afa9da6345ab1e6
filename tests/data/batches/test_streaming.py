"""Tests data that is streamed: its windows, its places, its batches, and how much of it is held in memory."""

import gc
import json
import random
import tracemalloc

import datasets
import numpy as np
import pytest

from deltatune.data import datasets as datasets_module
from deltatune.data.datasets import load_datasets
from deltatune.data.rows.sources import JsonLines, hugging_face
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.setup import training_order

ROWS = 47
DRAW = random.Random(0)
TEXTS = [" ".join([f"row {n}", *["dog"] * DRAW.randint(1, 40)]) for n in range(ROWS)]


@pytest.fixture
def folder(tmp_path):
    """A data folder with 47 texts to train on, blank lines among them, and 9 to validate on."""
    lines = [json.dumps({"text": text}) + "\n" + "\n" * (n % 5 == 0) for n, text in enumerate(TEXTS)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "valid.jsonl").write_text("".join(lines[:9]))
    return tmp_path


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(datasets_module, "SHUFFLED_ROWS", 10)


@pytest.fixture
def order(folder, tokenizer):
    """order(world=..., rank=..., **options) opens the stream and returns its batches for one rank."""

    def make(rank=0, world=1, data=folder, **options):
        options = {"batch_size": 4, "max_seq_length": 64} | options
        config = TrainConfig(data=str(data), streaming=True, **options)
        return training_order(load_datasets(config, tokenizer), config, Ranks(rank, world))

    return make


class Ranks:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def taken(batches, count):
    found = [next(batches) for _ in range(count)]
    return [(batch.inputs.tobytes(), batch.weights.tobytes(), batch.sources) for batch in found]


def sources(batches):
    return [source for _, _, rows in batches for row in rows for source in row]


@pytest.mark.parametrize("pack", [False, True])
def test_each_row_comes_once_a_pass_and_near_its_place(order, folder, pack):
    batches = order(pack=pack)
    seen = []
    while len(seen) < 2 * ROWS:
        seen += sources(taken(batches, 1))
    lines = [number for number, line in enumerate((folder / "train.jsonl").read_text().splitlines(), 1) if line]
    for one in (seen[:ROWS], seen[ROWS:]):
        numbers = [lines.index(int(source.rpartition(":")[2])) for source in one]
        assert sorted(numbers) == list(range(ROWS))
        # 10 rows are rounded up to 12, three batches of 4.
        assert [number // 12 for number in numbers] == [place // 12 for place in range(ROWS)]
        assert numbers != sorted(numbers)
    assert seen[:ROWS] != seen[ROWS:]


@pytest.mark.parametrize("pack", [False, True])
def test_a_stream_goes_on_from_any_batch_with_the_same_bits(order, pack):
    straight = taken(order(pack=pack), 30)
    for stop in (1, 12, 25):
        first = order(pack=pack)
        begun = taken(first, stop)
        state = json.loads(json.dumps(first.state()))
        second = order(pack=pack)
        second.restore(state)
        assert begun + taken(second, 30 - stop) == straight
        # As when a step fails: the same process returns to where it was.
        first.restore(state)
        assert taken(first, 30 - stop) == straight[stop:]


@pytest.mark.parametrize("pack", [False, True])
def test_ranks_share_the_batches_of_one(order, pack):
    alone, both = order(pack=pack), [order(rank, 2, pack=pack) for rank in range(2)]
    for _ in range(15):
        whole, parts = next(alone), [next(part) for part in both]
        for rank, part in enumerate(parts):
            assert np.array_equal(whole.inputs[rank::2], part.inputs)
            assert np.array_equal(whole.weights[rank::2], part.weights)


def saved(kind, folder):
    table = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    place = folder / kind
    if kind == "saved":
        datasets.DatasetDict({"train": table, "validation": table.select(range(9))}).save_to_disk(str(place))
        return place
    place.mkdir()
    table.select(range(9)).to_parquet(str(place / "validation-0.parquet"))
    for part in range(3):
        rows = table.shard(3, part, contiguous=True)
        write = {"parquet": rows.to_parquet, "jsonl": rows.to_json}[kind]
        write(str(place / f"train-{part}.{kind}"))
    if kind != "parquet":
        (place / "validation-0.parquet").unlink()
        (place / f"validation-0.{kind}").write_bytes((place / f"train-0.{kind}").read_bytes())
    return place


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved"])
def test_streamed_data_set_gives_the_batches_of_its_jsonl_file(order, tmp_path, kind):
    expected = [(inputs, weights) for inputs, weights, _ in taken(order(), 20)]
    data = saved(kind, tmp_path)
    batches = order(data=data)
    assert [(inputs, weights) for inputs, weights, _ in taken(batches, 17)] == expected[:17]
    second = order(data=data)
    second.restore(json.loads(json.dumps(batches.state())))
    assert [(inputs, weights) for inputs, weights, _ in taken(second, 3)] == expected[17:]


def test_a_place_is_the_same_however_the_stream_was_read(folder, tmp_path):
    for stream in (lambda: JsonLines(folder / "train.jsonl"), lambda: parquet_stream(tmp_path)):
        one = stream()
        rows, after = one.read(None, 20)
        again, end = one.read(after, 100)
        assert (len(rows), len(again)) == (20, ROWS - 20)
        other = stream()
        rest, place = other.read(after, 100)
        assert rest == again
        assert other.read(end, 100)[0] == stream().read(place, 100)[0] == []
        assert other.read(None, 20)[0] == rows


def parquet_stream(folder):
    place = folder / "parquet"
    return hugging_face(str(place if place.exists() else saved("parquet", folder)), streaming=True)["train"]


def test_memory_does_not_grow_with_the_data(tokenizer, tmp_path, monkeypatch):
    """Neither of the process that starts nor of one that continues; four times the rows keep the same memory.

    Memory is read behind a collection: when Python looks for cycles depends on every test before this one.
    """
    monkeypatch.setattr(datasets_module, "SHUFFLED_ROWS", 100)
    held = []
    for count in (200, 800):
        data = tmp_path / str(count)
        data.mkdir()
        (data / "train.jsonl").write_text(
            "".join(json.dumps({"text": f"{n:05d} dog fox"}) + "\n" for n in range(count))
        )
        config = TrainConfig(data=str(data), streaming=True, batch_size=10, max_seq_length=32)
        splits = load_datasets(config, tokenizer)
        batches = training_order(splits, config)
        taken(batches, 10)
        gc.collect()
        tracemalloc.start()
        most = 0
        for number in range(count // 10):
            next(batches)
            if number % 19 == 0:
                gc.collect()
                most = max(most, tracemalloc.get_traced_memory()[0])
        assert batches.state()["epoch"] == 1
        held.append(most)
        tracemalloc.stop()
    assert held[1] < 1.2 * held[0], held


def test_other_splits_read_no_more_than_they_evaluate(folder, tokenizer):
    def valid(**options):
        options = {"batch_size": 2, "max_seq_length": 64} | options
        return load_datasets(TrainConfig(data=str(folder), streaming=True, **options), tokenizer).valid

    assert len(valid(val_batches=3)) == 6
    assert len(valid(val_batches=-1)) == len(valid(val_batches=25)) == 9
    assert len(valid(val_batches=0)) == 0


def test_rows_that_are_too_long_are_left_out_window_by_window(order, folder):
    rows = [{"text": "dog " * (200 if 12 <= n < 24 else 3)} for n in range(36)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = order(overlong="skip")
    assert {int(source.rpartition(":")[2]) // 13 for source in sources(taken(batches, 6))} == {0, 1, 2} - {1} | {1}
    assert batches.state()["window"] == 2


WRONG = {
    "changed data": (lambda lines: ['{"text": "other"}\n', *lines[1:]], "has other rows where the run stopped"),
    "data that ends before": (lambda lines: lines[:3], "has other rows where the run stopped"),
}


@pytest.mark.bad_input("`streaming`: a resumed run with {what}")
@pytest.mark.parametrize("what", WRONG)
def test_a_resumed_stream_must_have_the_rows_that_it_had(order, folder, what):
    batches = order()
    taken(batches, 2)
    state, file = batches.state(), folder / "train.jsonl"
    change, message = WRONG[what]
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match=message):
        order().restore(state)


@pytest.mark.bad_input("`streaming` with what it cannot be combined with")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dpo"}, "the loss dpo reads its whole data set before the first step"),
        ({"epochs": 2}, "epochs cannot be counted; give iters"),
    ],
)
def test_options_that_need_the_whole_data(options, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(streaming=True, **options)
    assert TrainConfig(**options).streaming is False


UNSTREAMED = {
    "a row with an image": r"train.jsonl:1: .*; images and videos cannot be streamed",
    "no row": r"train.jsonl: no row in it",
    "a bad line later": r"train.jsonl:13: not JSON",
    "no training data": r"train.jsonl: no such data; it is needed to train",
}


@pytest.mark.bad_input("`streaming`: {what}")
@pytest.mark.parametrize("what", UNSTREAMED)
def test_data_that_cannot_be_streamed(order, folder, what):
    file = folder / "train.jsonl"
    if what == "a row with an image":
        file.write_text('{"prompt": "a", "completion": "b", "images": ["x.png"]}\n')
    elif what == "no training data":
        file.unlink()
    else:
        file.write_text("\n" if what == "no row" else '{"text": "a dog"}\n' * 12 + "{\n")
    message = UNSTREAMED[what]
    if what == "a bad line later":
        batches = order()
        taken(batches, 3)
        state = batches.state()
        for _ in range(2):
            with pytest.raises(UserError, match=message):
                next(batches)
        assert batches.state() == state
        return
    with pytest.raises(UserError, match=message):
        order()


@pytest.mark.bad_input("`streaming`: a part of a split, or several data sets, of `hf_dataset`")
def test_data_sets_that_cannot_be_streamed(order, tmp_path):
    one = {"path": str(saved("parquet", tmp_path)), "train_split": "train", "valid_split": "validation"}
    assert taken(order(hf_dataset=one), 1)
    with pytest.raises(UserError, match="one data set can be read, and hf_dataset names 2"):
        order(hf_dataset=[one, one])
    with pytest.raises(UserError, match=r"streaming reads whole splits, and train\[:80%\] is a part of one"):
        order(hf_dataset=one | {"train_split": "train[:80%]"})
