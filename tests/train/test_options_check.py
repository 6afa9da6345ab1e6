"""Mistakes that the options alone show are reported before a model is loaded."""

import pytest

from console import called
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.options_check import check_options


@pytest.mark.bad_input("an accumulation longer than the run, a single update at a rate of 0, files as sample prompts")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"iters": 3, "grad_accumulation_steps": 4}, "4 iterations make one update, and the run has 3"),
        (
            {"iters": 7, "grad_accumulation_steps": 4, "lr_schedule": {
                "name": "linear_schedule", "arguments": [1e-4, 0, 10], "warmup": 2}},
            "its learning rate is 0",
        ),
        ({"sample_prompts": ["why?", "x" * 5000, "none.jsonl"]}, "sample_prompts: none.jsonl: no such file"),
        ({"sample_prompts": [__file__]}, "is a file; a file of prompts has a name that ends with .jsonl"),
    ],
)  # fmt: skip
def test_a_run_that_would_change_nothing_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        check_options(TrainConfig(**options))


def test_an_epoch_shorter_than_an_accumulation_is_refused(make_trainer):
    with pytest.raises(UserError, match="12 iterations make one update, and the run has 11"):
        make_trainer(epochs=1, grad_accumulation_steps=12)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"learning_rate": 100.0, "optimizer": "adamw"}, True),
        ({"learning_rate": 100.0, "optimizer": "sgd"}, False),
        ({"learning_rate": 1e-3, "optimizer": "AdamW"}, False),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1.0, 10]}}, True),
    ],
)
def test_a_learning_rate_that_is_hardly_meant_is_noted(options, noted):
    assert len(check_options(TrainConfig(**options))) == noted


def test_all_this_comes_before_loading(checkpoint, data_folder, tmp_path):
    given = ["train", "--model", checkpoint, "--data", data_folder, "--adapter-path", tmp_path / "out"]
    for flag, value, said in (
        ("--optimizer", "adamww", "optimizer: unknown name 'adamww'"),
        ("--resume-adapter-file", "none.safetensors", "adapter none.safetensors: no such file"),
    ):
        wrong = called(*given, flag, value)
        assert wrong.returncode == 2
        assert said in wrong.stderr
        assert "Loading" not in wrong.stdout
    high = called(*given, "--learning-rate", 100, "--iters", 1, "--batch-size", 64)
    assert high.stdout.index("Note: the learning rate is 100") < high.stdout.index("Loading")
