"""Makes the doctor examine small shapes, with an empty cache of verdicts."""

import pytest

from console import cache_of
from deltatune.ops.gated_delta import gated_delta_chunk, trial_case
from deltatune.ops.gated_delta.trial_case import ShapeClass
from deltatune.ops.linear_attention import choice as linear_attention
from deltatune.ops.operator import verdicts
from deltatune.ops.operator.operator import Candidate
from deltatune.ops.operators import GATED_DELTA


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", cache_of(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(trial_case, "SMALL", (ShapeClass(1, 2, 8, 8, "float32"),))
    monkeypatch.setattr(trial_case, "MODELS", (ShapeClass(1, 1, 8, 8, "float32"),))
    for name in ("SMALL", "MODELS"):
        monkeypatch.setattr(linear_attention, name, (ShapeClass(1, 1, 8, 8, "float32", beta=""),))
    verdicts.forget()
    yield
    verdicts.forget()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """on_a_gpu(function): a device with `function` as its fused implementation."""

    def prepare(function):
        fused = lambda call: Candidate(function, call.shape_class(), function)  # noqa: E731
        monkeypatch.setitem(GATED_DELTA.orders, "cpu", ("fused", "chunk"))
        monkeypatch.setitem(GATED_DELTA.candidates, "fused", fused)

    return prepare


@pytest.fixture
def wrong():
    """An implementation with a y that is 1 % off that of gated_delta_chunk."""

    def function(*arrays, **options):
        y, state = gated_delta_chunk(*arrays, **options)
        return y * 1.01, state

    return function
