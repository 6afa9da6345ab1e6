"""The simulation agrees with MLX's own allocator to the buffer."""

import json
from pathlib import Path

import pytest

from counted_programs import LINUX, output_of

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def graphs():
    return output_of(FOLDER / "counted_graphs.py")


@LINUX
def test_every_buffer_and_byte_of_small_graphs_is_foreseen(graphs):
    assert len(graphs) > 25
    wrong = {name: found for name, found in graphs.items() if found["simulated"] != found["counted"]}
    assert not wrong
    assert all(simulated == counted for simulated, counted in (found["left"] for found in graphs.values()))


@LINUX
@pytest.mark.parametrize(
    "options",
    [
        {"family": "qwen3_5_moe", "depth": 2, "tokens": 256, "iterations": 3},
        {"depth": 2, "tokens": 64, "rows": 2, "accumulate": 2, "checkpoint": True, "iterations": 2},
        {
            "family": "qwen3_5_moe",
            "depth": 4,
            "tokens": 32,
            "rank": 64,
            "checkpoint": True,
            "iterations": 3,
            "expert_updates": "active",
        },
    ],
    ids=["experts", "accumulated, checkpointed", "experts updated by themselves"],
)
def test_training_is_foreseen_within_five_and_ten_percent(options):
    benchmark = Path(__file__).parents[2] / "benchmarks" / "plan.py"
    found = output_of(benchmark, "--worker", json.dumps(options | {"waiting": True}))
    assert found["planned"] == pytest.approx(found["counted"], rel=0.05)
    assert found["planned_bytes"] == pytest.approx(found["counted_bytes"], rel=0.10)
