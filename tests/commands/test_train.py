"""Flags of `deltatune train` that other trainers have: epochs, the adapter's size, every patch by name."""

import json

import pytest

from deltatune import cli, upstream
from deltatune.commands.flags import config_from

LINE = {"prompt": "the quick brown fox", "completion": "jumps over"}


@pytest.fixture
def train(run, checkpoint, tmp_path):
    for name, lines in (("train", 10), ("valid", 2)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(LINE) + "\n") * lines)
    out = tmp_path / "out"

    def call(*arguments, code=0):
        files = ["--model", checkpoint, "--data", tmp_path, "--adapter-path", out]
        found, said, err = run("train", *files, "--batch-size", "4", *arguments)
        assert found == code, err
        return said if code == 0 else err

    call.out = out
    return call


@pytest.mark.parametrize(("epochs", "iterations"), [("1", 3), ("2", 6), ("0.5", 2), ("0.01", 1)])
def test_epochs_are_passes_over_the_data(train, epochs, iterations):
    said = train("--epochs", epochs)
    assert f"Epochs: {float(epochs):g} of 3 iterations each, so {iterations} iterations." in said
    records = [json.loads(line) for line in (train.out / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["iteration"] == iterations


def test_a_run_of_epochs_can_be_resumed_to_more(train):
    train("--epochs", "1")
    assert "Resuming after iteration 3 of 6." in train("--epochs", "2", "--resume")


def test_patches_are_one_short_line_and_named_on_request(train):
    short = next(line for line in train("--iters", "1").splitlines() if "Patches: " in line)
    assert "gated_delta_update" not in short
    assert len(short) < 200
    named = train("--iters", "1", "--verbose").splitlines()
    assert any(line.startswith("gated_delta_update in ") for line in named), named


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("iters: 7", ["--epochs", "2"], (1000, 2.0)),
        ("epochs: 3", ["--iters", "9"], (9, None)),
        ("epochs: 3", [], (1000, 3.0)),
    ],
)
def test_a_flag_replaces_the_other_way_to_say_it_in_the_file(tmp_path, file, flags, expected):
    (tmp_path / "c.yaml").write_text(file)
    made = config_from(cli.parser().parse_args(["train", "-c", str(tmp_path / "c.yaml"), *flags]))
    assert (made.iters, made.epochs) == expected


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("{rank: 4, scale: 3}", ["--rank", "2"], (2, 3.0)),
        ("{rank: 4, scale: 3}", ["--alpha", "2"], (4, 0.5)),
        ("{rank: 4, alpha: 8}", ["--scale", "5"], (4, 5.0)),
        ("{rank: 4, alpha: 8}", ["--rank", "2"], (2, 4.0)),
        ("{rank_pattern: {q_proj: 2, k_proj: 3}}", [], {"q_proj": 2, "k_proj": 3}),
        ("{rank_pattern: {q_proj: 2, k_proj: 3}}", ["--rank-pattern", '{"mlp.*": 1}'], {"mlp.*": 1}),
    ],
)
def test_flags_of_the_adapters_win_over_the_file(tmp_path, file, flags, expected):
    (tmp_path / "c.yaml").write_text(f"lora_parameters: {file}")
    made = config_from(cli.parser().parse_args(["train", "-c", str(tmp_path / "c.yaml"), *flags])).lora_parameters
    assert (made.rank_pattern or (made.rank, made.scale)) == expected


@pytest.mark.bad_input("`--rank-pattern {pattern}`")
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ('{"experts.*": 4}', "deltatune: rank_pattern: 'experts.*' matches no module (nearest: mlp.switch_mlp.*"),
        ('{"q_proj": 0}', "deltatune: --rank-pattern: 'q_proj': expected a whole number of 1 or more, got 0."),
        ("q_proj=4", "deltatune train: argument --rank-pattern: not JSON (Expecting value: line 1 column 1 (char 0));"),
    ],
)
def test_a_pattern_that_makes_no_sense_ends_with_one_message(tiny_checkpoint, train, pattern, message):
    err = train("--model", tiny_checkpoint("qwen3_5_moe"), "--rank-pattern", pattern, code=2)
    assert err.startswith(message), err
    assert "Traceback" not in err


BOTH = "{scale: 1, alpha: 2}"


@pytest.mark.bad_input("{what}")
@pytest.mark.parametrize(
    ("what", "file", "flags", "message"),
    [
        ("`iters` and `epochs` in a file", "iters: 5\nepochs: 1", [], "c.yaml: iters and epochs set the same thing"),
        ("`--iters` and `--epochs`", "", ["--iters", "5", "--epochs", "1"], "deltatune: --iters and --epochs set the"),
        ("`--scale` and `--alpha`", "", ["--scale", "5", "--alpha", "1"], "deltatune: --scale and --alpha set the"),
        (
            "`scale` and `alpha` in a file",
            f"lora_parameters: {BOTH}",
            [],
            "c.yaml: lora_parameters: scale and alpha set",
        ),
        ("an unknown key whose value is null", "learning_rat: null", [], "unknown key 'learning_rat' (did you mean"),
    ],
)
def test_contradicting_options_are_refused(complaint, tmp_path, what, file, flags, message):
    (tmp_path / "c.yaml").write_text(file)
    assert message in complaint("train", "-c", tmp_path / "c.yaml", *flags)


@pytest.mark.bad_input("the optimizer's {what}")
@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("unknown name", "optimizer: adamm"),
        ("unknown setting", "optimizer: adamw\noptimizer_config: {adamw: {wieght_decay: 1}}"),
        ("negative `weight_decay`", "optimizer: adamw\noptimizer_config: {adamw: {weight_decay: -1}}"),
        ("`betas` of 1", "optimizer_config: {adamw: {betas: [0.9, 1]}}"),
        ("`betas` that are three", "optimizer_config: {adamw: {betas: [0.9, 0.9, 0.9]}}"),
        ("`eps` of 0", "optimizer_config: {adamw: {eps: 0}}"),
        ("`bias_correction` of 1", "optimizer_config: {adamw: {bias_correction: 1}}"),
        ("`momentum` as a text", "optimizer: sgd\noptimizer_config: {sgd: {momentum: high}}"),
        ("schedule without arguments", "lr_schedule: {name: cosine_decay}"),
        ("schedule whose name is a list", "lr_schedule: {name: [cosine_decay], arguments: [1]}"),
        ("schedule with a text for a number", "lr_schedule: {name: cosine_decay, arguments: [fast, 10]}"),
        ("schedule of a negative rate", "lr_schedule: {name: cosine_decay, arguments: [-1.0e-5, 10]}"),
        ("schedule of no rate at all", "lr_schedule: {name: linear_schedule, arguments: [0, 0, 10]}"),
        ("schedule of 0 steps", "lr_schedule: {name: cosine_decay, arguments: [1.0e-5, 0]}"),
        ("schedule with too many arguments", "lr_schedule: {name: cosine_decay, arguments: [1, 2, 3, 4]}"),
        ("warmup of half a step", "lr_schedule: {name: cosine_decay, arguments: [1.0e-5, 5], warmup: 0.5}"),
        ("negative warmup rate", "lr_schedule: {name: cosine_decay, arguments: [1.0e-5, 5], warmup_init: -1}"),
    ],
)
def test_settings_of_the_optimizer_are_refused_before_the_model_is_looked_for(complaint, tmp_path, what, file):
    (tmp_path / "c.yaml").write_text(f"model: /none\ndata: /none\n{file}\n")
    err = complaint("train", "-c", tmp_path / "c.yaml")
    assert err.startswith(("deltatune: optimizer", "deltatune: lr_schedule"))


def test_data_that_are_missing_are_named_before_a_model_is_downloaded(complaint, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(upstream, "download", lambda name: asked.append(name) or tmp_path)
    err = complaint("train", "--model", "owner/model", "--data", tmp_path / "nowhere")
    assert "nowhere: no such file or folder" in err
    assert not asked
