"""The flag `--rank-pattern`, through the installed console script."""

from __future__ import annotations

import json

import pytest

from console import called
from deltatune import cli
from deltatune.commands.flags import config_from


def test_the_flag_goes_before_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("lora_parameters: {rank: 4, rank_pattern: {q_proj: 2, k_proj: 3}}")
    words = ["plan", "-c", str(tmp_path / "c.yaml")]
    assert config_from(cli.parser().parse_args(words)).lora_parameters.rank_pattern == {"q_proj": 2, "k_proj": 3}
    words += ["--rank-pattern", '{"mlp.*": 1}']
    assert config_from(cli.parser().parse_args(words)).lora_parameters.rank_pattern == {"mlp.*": 1}


@pytest.mark.bad_input("`--rank-pattern {pattern}`")
@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ('{"experts.*": 4}', "deltatune: rank_pattern: 'experts.*' matches no module (nearest: mlp.switch_mlp.*"),
        ('{"q_proj": 0}', "deltatune: --rank-pattern: 'q_proj': expected a whole number of 1 or more, got 0."),
        ("q_proj=4", "deltatune train: argument --rank-pattern: not JSON (Expecting value: line 1 column 1 (char 0));"),
    ],
)
def test_a_pattern_that_makes_no_sense_ends_with_one_message(tiny_checkpoint, tmp_path, pattern, said):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "one line"}) + "\n")
    model = tiny_checkpoint("qwen3_5_moe")
    words = ["--model", model, "--data", tmp_path, "--batch-size", 1, "--rank-pattern", pattern]
    ended = called("train", *words)
    assert ended.returncode == 2
    assert ended.stderr.startswith(said), ended.stderr
    assert "Traceback" not in ended.stderr
