"""Distillation on the student's own answers: who answers, exact continuation, shapes of batches, the plan."""

import mlx.nn as nn
import numpy as np
import pytest

from deltatune.data import BatchOrder
from deltatune.data.batches.order import AnsweredOrder
from deltatune.data.example import Example
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.ending.interrupt import StoppedError
from deltatune.train.options_check import check_options
from deltatune.train.rollouts.answer_sampler import check_covered
from killed_runs import same


@pytest.fixture
def distilling(make_trainer, tiny_checkpoint):
    """distilling(**changes) -> a Trainer that learns from a teacher, with another answer of its own to each prompt."""
    teacher = tiny_checkpoint("qwen3_5", seed=5, num_hidden_layers=3, full_attention_interval=3)

    def make(**changes):
        options = {"loss": "distill", "teacher": str(teacher), "lmbda": 1.0, "max_completion_length": 12}
        return make_trainer(**options | changes)

    return make


def watched(run_with, trainer):
    """Run a trainer; return its batches."""
    batches = []
    run_with(trainer, lambda _, batch: batches.append(batch))
    return batches


def answers(batch):
    """Return the prompt and the answer of each document of a batch, as tuples of tokens, and its source."""
    found = []
    for row, weights in enumerate(batch.weights):
        start = 0
        for source, positions in zip(batch.sources[row], batch.positions[row], strict=True):
            tokens = [batch.inputs[row, start], *batch.targets[row, start : start + positions]]
            counted = int((weights[start : start + positions] > 0).sum())
            found.append((tuple(tokens[:-counted]), tuple(tokens[-counted:]), source))
            start += positions
    return found


def test_the_model_answers_the_prompts_of_the_data(distilling, splits, run_with, tmp_path, read_metrics, screen_text):
    batches = watched(run_with, distilling(iters=4, steps_per_report=2))
    of_data = {example.source: example for example in splits.train}
    seen = [document for batch in batches for document in answers(batch)]
    assert len(seen) == 16
    for prompt, answer, source in seen:
        example = of_data[source]
        assert prompt == tuple(example.tokens[~example.targets])
        assert 1 <= len(answer) <= 12
    assert any(answer != tuple(of_data[source].tokens[of_data[source].targets]) for _, answer, source in seen)
    reports = [record for record in read_metrics(tmp_path / "out") if "train_loss" in record]
    assert all(record["sampled/share"] == 1 for record in reports)
    lengths = [len(answer) for _, answer, _ in seen[:8]]
    assert reports[0]["completions/mean_length"] == pytest.approx(np.mean(lengths))
    assert reports[0]["completions/max_length"] == max(lengths)
    assert ", sampled 1.000, length " in screen_text.text()
    shown = next(record["samples"] for record in read_metrics(tmp_path / "out") if "samples" in record)
    assert len(shown) == 3
    assert all("question" in sample["prompt"] and sample["reward"] == "" for sample in shown)
    report = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "Sampled answers" in report
    assert "Some answers before each report" in report


def test_a_draw_decides_who_answers_an_update(distilling, splits, run_with, tmp_path, read_metrics):
    """The batches of the data stand where they stand without sampling."""
    batches = watched(run_with, distilling(iters=16, lmbda=0.5, beta=0.5, steps_per_report=16))
    plain = BatchOrder(splits.train, 4, 64)
    sampled = []
    for batch in batches:
        expected = next(plain)
        assert sorted(batch.sources) == sorted(expected.sources)
        sampled.append(not np.array_equal(batch.inputs, expected.inputs))
    # Two batches make an update.
    assert sampled[::2] == sampled[1::2]
    assert 2 <= sum(sampled[::2]) <= 6
    records = read_metrics(tmp_path / "out")
    (report,) = [record for record in records if "train_loss" in record]
    assert report["sampled/share"] == np.mean(sampled)
    losses = [record["val_loss"] for record in records if "val_loss" in record]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    "changes",
    [{"pack": True}, *(pytest.param(each, marks=pytest.mark.weekly) for each in ({}, {"lmbda": 0.5, "pack": True}))],
    ids=str,
)
def test_a_stopped_run_continues_with_the_same_bits(changes, distilling, run_with, tmp_path):
    """It is stopped within an accumulation, of which no answer is saved."""
    changes |= {"iters": 4}
    distilling(adapter_path=str(tmp_path / "straight"), **changes).run()

    def stop(iterations, _batch):
        if iterations.progress.iteration == 2:
            iterations.ending.stop.asked = True

    with pytest.raises(StoppedError, match="after iteration 3"):
        run_with(distilling(**changes), stop)
    distilling(resume=True, **changes).run()
    same(tmp_path / "straight", tmp_path / "out")


def test_answers_share_rows_and_stay_within_a_batch(distilling, splits, run_with):
    """Long answers need more rows than those of the data: the last prompts of a batch are left out."""
    batches = watched(run_with, distilling(iters=2, pack=True, max_seq_length=128, max_completion_length=32))
    plain = BatchOrder(splits.train, 4, 128, packed=True)
    for batch in batches:
        assert batch.inputs.shape[0] == 4
        assert batch.inputs.shape[1] <= 128
        asked = [example.source for example in plain.next_examples()]
        answered = [source for _, _, source in answers(batch)]
        assert len(answered) == min(8, len(asked))
        assert sorted(answered) == sorted(asked[: len(answered)])


def test_a_batch_of_other_documents_has_the_shapes_of_the_data(splits):
    order = AnsweredOrder(splits.train, 4, 64, packed=True, answer=12)
    documents = [example.prompt.answered(np.arange(1, 13, dtype=np.int32)) for example in splits.train]
    batch = order.batch_of(documents)
    # As many as fit, in their order.
    fitting = [source for row in batch.sources for source in row]
    assert sorted(fitting) == sorted(document.source for document in documents[: len(fitting)])
    assert 4 < len(fitting) < len(documents)
    assert order.batch_of(documents[:1]).weights.sum() == 12
    assert order.batch_of([]).weights.sum() == 0
    assert batch.inputs.shape[0] == 4
    assert order.longest == BatchOrder(documents, 4, 64).widths[-1]
    # A row of one example has room for two with other answers.
    assert AnsweredOrder(splits.train[:1], 4, 128, packed=True, answer=12).widths == [64, 128]


def test_the_prompt_of_a_row_is_all_before_its_last_answer():
    def row(marks):
        return Example(np.arange(len(marks), dtype=np.int32), np.array(marks, bool), "row")

    prompt = row([0, 0, 1, 1, 0, 0, 1, 1]).prompt
    assert prompt.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert not prompt.targets.any()
    assert row([0, 1, 1, 1]).prompt.tokens.tolist() == [0]
    answered = prompt.answered(np.array([9], np.int32))
    assert (answered.tokens.tolist(), answered.targets.tolist()) == ([0, 1, 2, 3, 4, 5, 9], [False] * 6 + [True])


@pytest.mark.bad_input("answers of a student that cannot be sampled")
def test_a_student_that_no_engine_covers_is_named():
    config = TrainConfig(loss="distill", teacher="t")
    with pytest.raises(UserError, match=r"loss: distill samples .* cannot yet: .* Give lmbda: 0 to learn from the"):
        check_covered(nn.Linear(2, 2), config)


@pytest.mark.bad_input("`--lmbda 0` with an option of sampled answers")
def test_answers_of_the_data_read_no_option_of_sampling():
    with pytest.raises(UserError, match=r"top_k: read only where the model samples answers: .* lmbda above 0, which"):
        check_options(TrainConfig(loss="distill", teacher="t", lmbda=0, top_k=5))
