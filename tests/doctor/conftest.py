"""Makes the doctor examine small shapes, with an empty cache of verdicts."""

import pytest

from deltatune.doctor import implementations
from deltatune.machine import backend
from deltatune.ops.gated_delta import choice, gated_delta_chunk
from deltatune.ops.gated_delta.trial_case import ShapeClass
from deltatune.ops.trial import verdicts
from deltatune.ops.trial.candidates import Candidate


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(implementations, "_CHUNK", (ShapeClass(1, 2, 8, 8, "float32"),))
    monkeypatch.setattr(implementations, "_MODELS", (ShapeClass(1, 1, 8, 8, "float32"),))
    verdicts.forget()
    yield
    verdicts.forget()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """on_a_gpu(function): a device whose fused implementation is `function`."""

    def prepare(function):
        monkeypatch.setattr(backend, "_GATED_DELTA", {"cpu": ("fused", "chunk")})
        found = choice.CANDIDATES | {"fused": lambda call: Candidate(function, call.shape_class(), function)}
        monkeypatch.setattr(choice, "CANDIDATES", found)

    return prepare


@pytest.fixture
def wrong():
    """An implementation whose y is 1 % off that of gated_delta_chunk."""

    def function(*arrays, **options):
        y, state = gated_delta_chunk(*arrays, **options)
        return y * 1.01, state

    return function
