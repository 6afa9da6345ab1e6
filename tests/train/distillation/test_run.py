"""Runs that learn from a teacher: exact continuation, refusals, a teacher in 4 bits, the plan."""

import dataclasses
import gc
import json
import re
import shutil
from pathlib import Path

import pytest
from mlx.utils import tree_flatten

from console import called
from deltatune.data.datasets import load_datasets
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train import distillation as teachers
from deltatune.train.setup import prepare
from deltatune.train.updates.routers import FIGURES


@pytest.fixture(scope="session")
def teacher(tiny_checkpoint):
    """A checkpoint with the student's vocabulary, other weights and a layer more."""
    return tiny_checkpoint("qwen3_5", seed=5, num_hidden_layers=3, full_attention_interval=3)


@pytest.fixture
def distilling(make_trainer, teacher):
    """distilling(**changes) -> a Trainer that learns from the teacher."""

    def make(**changes):
        return make_trainer(**{"loss": "distill", "teacher": str(teacher), "lmbda": 0.0} | changes)

    return make


def test_a_run_comes_closer_to_its_teacher(
    distilling, tmp_path, read_metrics, screen_text, teacher, checkpoint, data_folder
):
    splits = load_datasets(TrainConfig(data=str(data_folder), test=True), load(checkpoint).tokenizer)
    distilling(splits=splits, test=True, iters=16, beta=0.5, temperature=2.0).run()
    losses = [record["val_loss"] for record in read_metrics(tmp_path / "out") if "val_loss" in record]
    assert losses[-1] < 0.9 * losses[0]
    shown = " ".join(screen_text.text().split())
    assert f"divergence from {teacher}" in shown
    # The test measures what other runs measure: the cross-entropy of the data.
    assert float(re.search(r"Test loss ([\d.]+), test perplexity", shown)[1]) > 2 > losses[0]


def test_a_model_has_no_divergence_from_itself(distilling, checkpoint, tmp_path, read_metrics):
    for beta in (0.0, 0.3, 1.0):
        distilling(teacher=str(checkpoint), beta=beta, iters=1, grad_accumulation_steps=1, overwrite=True).run()
        assert abs(read_metrics(tmp_path / "out")[0]["val_loss"]) < 1e-6


def test_a_continued_run_has_the_bits_of_a_straight_one(distilling, tmp_path, teacher):
    """The break is inside an accumulation, and the teacher has moved."""
    moved = shutil.copytree(teacher, tmp_path / "moved")
    distilling(adapter_path=str(tmp_path / "straight"), iters=4).run()
    distilling(iters=3).run()
    distilling(resume=True, teacher=str(moved), iters=4).run()
    adapters = [(tmp_path / folder / "adapters.safetensors").read_bytes() for folder in ("out", "straight")]
    assert adapters[0] == adapters[1]


@pytest.mark.bad_input("`--resume` with other weights of the teacher")
def test_another_teacher_is_refused(distilling, checkpoint):
    distilling(iters=2).run()
    with pytest.raises(UserError, match="teacher: other weights than those that the run began with"):
        distilling(resume=True, teacher=str(checkpoint)).run()


def test_a_teacher_in_4_bits_and_packed_rows(distilling, tiny_checkpoint, tmp_path, read_metrics):
    quantised = tiny_checkpoint("qwen3_5", seed=5, num_hidden_layers=3, full_attention_interval=3, quantize={})
    distilling(teacher=str(quantised), pack=True, iters=6).run()
    losses = [record["val_loss"] for record in read_metrics(tmp_path / "out") if "val_loss" in record]
    assert losses[-1] < losses[0]


def test_a_teacher_is_held_once_and_given_up(teacher):
    config = TrainConfig(loss="distill", teacher=str(teacher))
    loaded = teachers.teacher_of(config)
    assert teachers.teacher_of(config) is loaded
    assert not tree_flatten(loaded.trainable_parameters())
    del loaded
    gc.collect()
    assert str(teacher) not in teachers._teachers


@pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
def test_the_plan_holds_the_teacher(checkpoint, teacher, tiny_checkpoint):
    deeper = tiny_checkpoint("qwen3_5", seed=5, num_hidden_layers=9, full_attention_interval=3)
    layout, peaks, held = ArrayLayout.measured(), [], []
    for folder in (teacher, deeper):
        config = TrainConfig(
            num_layers=-1, lora_parameters=LoraConfig(rank=2), loss="distill", teacher=str(folder), batch_size=4
        )
        model = load(checkpoint).model
        prepare(model, config)
        peaks.append(forecast_step(model, config, BatchShape(4, 128), layout).bytes.amount)
        held.append(sum(array.nbytes for _, array in tree_flatten(load(folder).model.parameters())))
    # The layers of the deeper teacher are alive in the backward pass, and nothing else of them.
    assert peaks[1] - peaks[0] == pytest.approx(held[1] - held[0], rel=0.02), (peaks, held)


def test_the_routers_of_the_teacher_are_not_the_models(make_trainer, tiny_checkpoint, tmp_path, read_metrics):
    student = tiny_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2)
    teacher = tiny_checkpoint("qwen3_5_moe", seed=5, num_hidden_layers=2, full_attention_interval=2)
    reported = []
    for loss in ({}, {"loss": "distill", "teacher": str(teacher), "lmbda": 0.0}):
        changes = {"router_aux_loss_coef": 0.1, "iters": 2, "steps_per_report": 1, "overwrite": True}
        make_trainer(model=str(student), **changes, **loss).run()
        reported.append(next(record for record in read_metrics(tmp_path / "out") if "aux_loss" in record))
    assert [reported[0][name] for name in FIGURES] == [reported[1][name] for name in FIGURES]


@pytest.mark.bad_input("`--loss distill` for rows with images")
def test_pictures_are_refused(checkpoint, teacher):
    loaded = dataclasses.replace(load(checkpoint), processor=object())
    with pytest.raises(UserError, match="distill learns from text, and the data have images"):
        teachers.checked_teacher(TrainConfig(loss="distill", teacher=str(teacher)), loaded)


def other_vocabulary(folder: Path) -> str:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[7:9]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return f"expected the vocabulary of the model, and token {vocabulary[two]} is"


@pytest.mark.bad_input("a teacher with another vocabulary")
def test_another_vocabulary_is_refused(checkpoint, teacher, data_folder, tmp_path):
    folder = shutil.copytree(teacher, tmp_path / "other")
    words = other_vocabulary(folder)
    command = ["train", "--model", checkpoint, "--data", data_folder, "--loss", "distill", "--teacher", folder]
    done = called(*command, "--adapter-path", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


@pytest.mark.bad_input("a teacher with other logits than the model")
def test_another_number_of_logits_is_refused(distilling, tiny_checkpoint):
    wider = tiny_checkpoint("qwen3_5", vocab_size=512)
    with pytest.raises(UserError, match=r"expected as many logits as the model has, which are \d+, got 512"):
        distilling(teacher=str(wider)).run()


@pytest.mark.bad_input("`--loss distill` without `--teacher`, and with a beta above 1")
def test_options_of_distillation():
    with pytest.raises(UserError, match="loss: distill needs a teacher"):
        TrainConfig(loss="distill")
    with pytest.raises(UserError, match=r"beta: expected a number from 0 to 1 with loss distill, got 1\.5"):
        TrainConfig(loss="distill", teacher="t", beta=1.5)


def test_the_command_line_distils(checkpoint, teacher, data_folder, tmp_path):
    command = ["train", "--model", checkpoint, "--data", data_folder, "--loss", "distill", "--teacher", teacher]
    done = called(*command, "--streaming", "--iters", 2, "--max-seq-length", 64, "--adapter-path", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapters.safetensors").is_file()
