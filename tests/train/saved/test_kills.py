"""Tests that runs of every kind, killed at random points and resumed, end with the bits of a run never killed.

scripts/kill_runs.py runs this file with more kills. Runs of several processes are killed in test_peers.py.
"""

import json
import random
import signal
import subprocess
import sys

import pytest

from deltatune import cli
from killed_runs import KILLED_AT_A_POINT, result

# Options that a kind of run adds to those of conftest.py.
KINDS = {
    "adapters": {},
    "full": {"fine_tune_type": "full"},
    "experts": {},
    "packed": {
        "pack": True,
        "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.1, "rank_pattern": {"mlp.*": 2, "o_proj": 1}},
    },
    "sampled answers": {
        "loss": "grpo",
        "batch_size": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "num_iterations": 2,
        "temperature": 0.8,
        "reward_funcs": ["regex:[a-m]$", "length:4"],
    },
    "student's answers": {"loss": "distill", "lmbda": 0.5, "max_completion_length": 12, "grad_accumulation_steps": 2},
    "images": {"parts": "language,vision,projector"},
}
# Where a kill may come: after a number of iterations, halfway through a state file, or right after a file operation.
# Every save flushes or moves six files and more.
POINTS = {"iteration": 6, "write": 3, "replace": 14, "fsync": 14}
# From these on a state is saved, which the continued run must read. The first kill comes there, later ones anywhere.
SAVED = {"iteration": 4, "write": 2, "replace": 8, "fsync": 8}


@pytest.fixture
def of_kind(options, request, tmp_path):
    """of_kind(kind) returns the options of a run of 8 iterations of that kind, without its folder."""

    def make(kind):
        values = options | KINDS[kind]
        if kind == "experts":
            make_checkpoint = request.getfixturevalue("tiny_checkpoint")
            values["model"] = str(make_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2))
        if kind == "student's answers":
            make_checkpoint = request.getfixturevalue("tiny_checkpoint")
            values["teacher"] = str(make_checkpoint("qwen3_5", seed=5))
        if kind == "images":
            pytest.importorskip("mlx_vlm")
            values["model"] = str(request.getfixturevalue("tiny_vision_checkpoint")("qwen3_5"))
            values |= {"data": str(request.getfixturevalue("pictures")), "max_seq_length": 256}
        return values

    return make


# A state has the same files whatever the model is; that of sampled answers has the most arrays. Adapters are killed at
# chosen points in test_resume.py.
DAILY = ("sampled answers",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.weekly] * (kind not in DAILY)) for kind in KINDS]
)
def test_killed_at_random_points_the_run_ends_with_the_same_bits(of_kind, kind, tmp_path, request):
    wanted = request.config.getoption("--kills") or 1
    values, file = of_kind(kind), tmp_path / "run.yaml"

    def configured(name):
        file.write_text(json.dumps(values | {"adapter_path": str(tmp_path / name)}))
        return str(file)

    assert cli.main(["train", "-c", configured("straight")]) == 0
    expected = result(tmp_path / "straight")
    draw = random.Random(kind)
    kills = runs = 0
    while kills < wanted:
        # A run that finished gives way to another, until enough were killed.
        runs += 1
        finished = False
        while not finished:
            if kills >= wanted:
                assert cli.main(["train", "-c", configured(f"out{runs}"), "--resume"]) == 0
                break
            where = draw.choice(sorted(POINTS))
            count = str(draw.randint(1 if kills else SAVED[where], POINTS[where]))
            command = [sys.executable, "-c", KILLED_AT_A_POINT, where, count, configured(f"out{runs}"), "--resume"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            finished = done.returncode == 0
            kills += not finished
        found = result(tmp_path / f"out{runs}")
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
    print(f"{kind}: {kills} kills, {runs} runs, each with the same bits in {len(expected)} files and arrays")
