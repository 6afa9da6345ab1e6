"""A run that cannot learn from sampled answers is refused before anything is sampled."""

import json

import mlx.nn as nn
import pytest

from console import called, deltatune
from deltatune.data.datasets import load_datasets
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.options.config import TrainConfig
from deltatune.train.options_check import check_options
from deltatune.train.rollouts.answer_sampler import check_covered

WRONG = {
    "a form of another loss": ({"loss_variant": "hinge"}, "grpo has no form 'hinge'; expected dapo"),
    "cispo without its limit": ({"loss_variant": "cispo"}, "epsilon_high: cispo needs the largest ratio"),
    "a reference within top_k": ({"beta": 0.1, "top_k": 5}, "beta: the reference may give .* leave these out"),
    "packed answers that gspo weighs": (
        {"pack": True, "loss_variant": "gspo"},
        "pack: loss_variant: gspo weighs whole",
    ),
    "packed answers that a correction weighs": (
        {"pack": True, "sampler_correction": "sequence"},
        "pack: sampler_correction: sequence weighs whole answers",
    ),
    "a reference of full fine-tuning": (
        {"beta": 0.1, "fine_tune_type": "full"},
        "beta: the reference is the model without its adapter, and fine_tune_type: full trains them",
    ),
}


@pytest.mark.bad_input("`loss: grpo` with {name}")
@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit_the_loss_are_refused(name):
    options, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        check_options(TrainConfig(loss="grpo", **options))


@pytest.mark.bad_input("answers as long as a whole row")
def test_a_row_holds_a_prompt_and_its_answer():
    with pytest.raises(UserError, match="max_completion_length: expected less than max_seq_length, which is 512"):
        TrainConfig(loss="grpo", max_completion_length=512, max_seq_length=512)


@pytest.mark.bad_input("`beta: 0` with a preference loss")
def test_a_preference_loss_has_a_factor():
    with pytest.raises(UserError, match="beta: expected a number above 0 with loss dpo, got 0"):
        check_options(TrainConfig(loss="dpo", beta=0))


@pytest.fixture
def prompts_of(checkpoint, tmp_path):
    """prompts_of(rows, **options) returns the splits of a run on these rows."""

    def read(rows, **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lengths = {"max_completion_length": 8, "max_seq_length": 40, "batch_size": 1}
        return load_datasets(TrainConfig(loss="grpo", data=str(file), **lengths | options), load(checkpoint).tokenizer)

    return read


@pytest.mark.bad_input("a prompt that leaves no room for an answer")
def test_a_long_prompt_is_named_or_left_out(prompts_of):
    rows = [{"prompt": "short"}, {"prompt": "long " * 40}]
    with pytest.raises(UserError, match=r"rows.jsonl:2: the prompt takes .* raise max_seq_length"):
        prompts_of(rows)
    splits = prompts_of(rows, overlong="skip")
    assert len(splits.train) == 1
    assert "1 of 2 prompts was left out" in splits.notes[0]


@pytest.mark.bad_input("an image in a prompt for a model without a vision tower")
def test_rows_with_images_are_refused(prompts_of):
    with pytest.raises(UserError, match=r"rows.jsonl:1: this row has images, and the model no vision tower; remove"):
        prompts_of([{"prompt": "what is this?", "images": ["a.png"]}])


def test_prompts_of_every_format_with_their_columns(prompts_of):
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    splits = prompts_of(
        [
            {"prompt": "2 + 2?", "level": 3},
            {"prompt": "2 + 2?", "completion": "4"},
            {"messages": turns, "source": "school"},
            {"prompt": turns[:1], "answer": "four"},
            {"text": "2 + 2 ="},
        ]
    )
    text, completed, chat, prompt, _ = splits.train
    assert text.tokens.tolist() == completed.tokens.tolist() == chat.tokens.tolist() == prompt.tokens.tolist()
    assert [example.question for example in splits.train] == ["2 + 2?", "2 + 2?", turns[:1], turns[:1], "2 + 2 ="]
    assert text.columns == {"level": 3}
    assert completed.columns == {"completion": "4", "answer": "4"}
    assert chat.columns == {"source": "school", "answer": "4"}
    assert prompt.columns == {"answer": "four"}
    assert [example.plain for example in splits.train] == [False] * 4 + [True]
    assert not any(example.targets.any() for example in splits.train)
    assert splits.facts.turns


@pytest.mark.bad_input("a model of which answers cannot be sampled")
def test_a_model_that_no_engine_covers_is_named():
    with pytest.raises(UserError, match=r"layers.linear.Linear cannot yet: .* with caches that can be joined"):
        check_covered(nn.Linear(2, 2), TrainConfig(loss="grpo"))


@pytest.mark.bad_input("`eval` of a file with `loss: grpo`")
def test_eval_has_no_rewards(checkpoint, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "c.yaml").write_text(json.dumps({"model": str(checkpoint), "data": str(tmp_path), "loss": "grpo"}))
    done = called("eval", "-c", tmp_path / "c.yaml")
    assert done.returncode == 2
    assert "loss: grpo has rewards in the place of a loss on a test set" in done.stderr


def test_the_console_script_learns_by_a_file_of_rewards(checkpoint, data_folder, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def short(completions):\n    return [-len(text) / 10 for text in completions]\n"
    )
    sizes = ["--batch-size", 1, "--num-generations", 4, "--max-completion-length", 8, "--max-seq-length", 64]
    run = ["train", "--model", checkpoint, "--data", data_folder, "--loss", "grpo", *sizes, "--adapter-path", "out"]
    rewards = ["--reward-funcs", "rewards.py:short", "regex:[a-m]", "--reward-weights", "1", "0.5"]
    done = deltatune(*run, *rewards, "--iters", 2, "--steps-per-report", 1, "--num-layers", -1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("Iter 2/2"))
    assert "reward -" in line
    assert "length " in line
    records = [json.loads(text) for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    record = [record for record in records if "reward" in record][-1]
    assert record["reward"] == pytest.approx(
        record["rewards/short/mean"] + 0.5 * record["rewards/regex/mean"], abs=1e-5
    )
    refused = called(*run, "--reward-funcs", "nowhere.py:short", cwd=tmp_path)
    assert refused.returncode == 2
    assert "Loading" not in refused.stdout
