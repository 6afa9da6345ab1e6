"""Tests runs on streamed data: killed and resumed they end with the same bits, and a bad row costs nothing trained."""

import shutil

import pytest

from deltatune.data import datasets
from deltatune.data.datasets import load_datasets
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.fit import shape
from deltatune.train.saved import state
from deltatune.train.setup import ready
from killed_runs import adapters, result

# 44 rows of training data are windows of 12, 12, 12 and 8, so 8 iterations of 4 rows end in the third one.
STREAMED = {"streaming": True}


@pytest.fixture
def streamed(options, checkpoint, make_trainer, monkeypatch):
    """streamed(**changes) returns the Trainer of a streamed run."""
    monkeypatch.setattr(datasets, "SHUFFLED_ROWS", 10)

    def make(**changes):
        values = options | STREAMED | changes
        config = TrainConfig(**values | {"lora_parameters": LoraConfig(**values["lora_parameters"])})
        return make_trainer(splits=load_datasets(config, load(checkpoint).tokenizer), **STREAMED | changes)

    return make


def test_a_resumed_stream_ends_with_the_same_bits(streamed, tmp_path, screen_text):
    """It stops in the second window of packed rows, inside an accumulation, and continues into the third."""
    streamed(adapter_path=str(tmp_path / "straight"), pack=True, iters=8).run()
    streamed(pack=True, iters=5).run()
    trainer = streamed(resume=True, pack=True, iters=8)
    trainer.run()
    said = screen_text.text()
    assert "Resuming after iteration 5 of 8" in said
    assert "12 rows are read and shuffled at a time" in said
    ours, theirs = result(tmp_path / "out"), result(tmp_path / "straight")
    same = {name for name in theirs if name != "metrics"} & ours.keys()
    assert {name for name in same if ours[name] != theirs[name]} == set()
    assert {"adapters.safetensors", "optimizer/step"} <= same
    assert trainer._train_order.state()["window"] >= 2


@pytest.mark.bad_input("`streaming`: a row that cannot be trained on, met during training")
@pytest.mark.parametrize("early", [False, True], ids=["", "iterations start early"])
def test_a_bad_row_costs_nothing_that_was_trained(streamed, data_folder, tmp_path, screen_text, request, early):
    if early:
        request.getfixturevalue("early_starts")
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join([*lines[:15], "{\n", *lines[16:]]))
    straight = {"adapter_path": str(tmp_path / "straight")}
    streamed(iters=5, **straight).run()
    with pytest.raises(
        UserError, match=r"train.jsonl:16: not JSON.* The state after iteration 2 is saved in .*state; mend"
    ):
        streamed(data=str(data), iters=5, save_every=100).run()
    # Three batches are the first window; the last of them waits in an accumulation, which starts again.
    (data / "train.jsonl").write_text("".join(lines))
    streamed(data=str(data), iters=5, save_every=100, resume=True).run()
    assert "Resuming after iteration 2 of 5" in screen_text.text()
    assert adapters(tmp_path / "out") == adapters(tmp_path / "straight")


@pytest.mark.bad_input("`streaming`: a file that is deleted during training")
def test_a_stream_that_is_gone_costs_nothing_that_was_trained(streamed, data_folder, tmp_path, run_with):
    """The error comes where a window is due, inside an accumulation that began in another one."""
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)

    def act(iterations, _):
        if iterations.progress.iteration == 9:
            for name in (data / "train.jsonl", tmp_path / "out" / "metrics.jsonl"):
                name.unlink()

    gone = r"train.jsonl: cannot be read \(No such file.* The state after iteration 8 is saved in .*state; mend"
    with pytest.raises(UserError, match=gone):
        run_with(streamed(data=str(data), iters=20, grad_accumulation_steps=4, save_every=100), act)
    assert state.peek(state.state_path(tmp_path / "out")).order["window"] == 2


def test_a_stream_is_planned_for_its_longest_row(options, tmp_path):
    config = TrainConfig(**options | STREAMED | {"lora_parameters": LoraConfig(rank=2), "max_seq_length": 96})
    run = ready(config, lazy=True)
    assert shape(run) == (4, 96)
    assert run.splits.train
