"""Runs with reward functions: a mistake in a file comes before the model, and a failure loses nothing trained."""

import json

import pytest

from console import called

FUNCTIONS = """
from pathlib import Path

def letters(completions, letter):
    return [text.count(one) / 12 for text, one in zip(completions, letter)]

def fails_later(completions):
    calls = Path("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) == 3:
        raise ValueError("no judge")
    return [1.0 for _ in completions]
"""


@pytest.fixture
def train(tmp_path, checkpoint):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"question {n} ", "letter": "aeiou"[n % 5]} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"iters": 4, "batch-size": 2, "num-generations": 4, "max-completion-length": 12, "max-seq-length": 64}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]

    def run(*flags, model=checkpoint):
        start = ["train", "--model", model, "--data", "prompts.jsonl", "--loss", "grpo"]
        return called(*start, *words, "--adapter-path", "out", *flags, cwd=tmp_path)

    return run


@pytest.mark.bad_input("a reward file with a mistake, and a model that is missing")
def test_a_mistake_in_a_file_is_named_before_the_model_is_looked_for(train, tmp_path):
    (tmp_path / "wrong.py").write_text("def f(completions)\n    return []\n")
    done = train("--reward-funcs", "wrong.py:f", model="nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "wrong.py, line 1, is not Python: expected ':'" in done.stderr


def test_a_run_that_a_failure_has_ended_goes_on_without_its_rewards(train):
    flags = ["--reward-funcs", "rewards.py:letters,fails_later", "--reward-weights", "1", "0.5"]
    done = train(*flags)
    assert done.returncode == 2
    assert "reward fails_later (rewards.py): raised ValueError: no judge (rewards.py, line 11)" in done.stderr
    assert "The state after iteration 2 is saved" in done.stderr
    done = train(*flags, "--reward-errors", "none", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Resuming after iteration 2 of 4." in done.stdout
