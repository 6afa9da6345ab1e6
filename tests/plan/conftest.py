"""A tiny run, and MLX's own count of memory made exact, so that plans can be compared with it."""

import json

import mlx.core as mx
import pytest

from deltatune.plan import simulate


@pytest.fixture
def options(tmp_path, checkpoint):
    """Options of plan and train for a tiny model and four short lines."""
    data = tmp_path / "data"
    data.mkdir()
    line = json.dumps({"prompt": "the quick brown fox", "completion": "jumps over"})
    (data / "train.jsonl").write_text((line + "\n") * 4)
    return ["--model", checkpoint, "--data", data, "--batch-size", 4, "--max-seq-length", 64]


@pytest.fixture
def waiting_queue(monkeypatch):
    """Makes MLX and the plan wait for each operation before the next; else timing decides how far MLX runs ahead."""
    # A task is never full and none may run ahead, so that the simulated queue is emptied after every primitive.
    monkeypatch.setattr(simulate, "TASKS_AHEAD", -1)
    monkeypatch.setitem(simulate.PACES, "cpu", simulate.Pace(10**9, releases=True))
    limit = mx.set_memory_limit(1)
    yield
    mx.set_memory_limit(limit)
