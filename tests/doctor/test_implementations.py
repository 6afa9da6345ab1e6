"""The doctor's findings on the implementations of gated_delta."""

import itertools
import math

import mlx.core as mx
import pytest

from deltatune.doctor import implementations
from deltatune.machine import backend
from deltatune.ops import operators
from deltatune.ops.attention import attention_blocked, trial_case
from deltatune.ops.gated_delta import gated_delta_chunk
from deltatune.ops.gated_delta import trial_case as delta_case
from deltatune.ops.gated_delta.trial_case import NAMES
from deltatune.ops.operator import timing, verdicts
from deltatune.ops.operator.operator import Candidate, Operator
from deltatune.ops.operators import ATTENTION, GATED_DELTA


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """The device is the CPU, whatever this machine has."""
    monkeypatch.setattr(backend, "device", lambda: "cpu")


def of_gated_delta():
    """The findings on gated_delta."""
    return implementations._of_operator(GATED_DELTA).findings


def tried():
    """The finding on gated_delta's fused implementation."""
    (finding,) = implementations._tried(GATED_DELTA, "fused", GATED_DELTA.order()[0])
    return finding


def test_every_operator_is_examined_and_chunk_is_right_here():
    found = {found.name: found.findings for found in implementations.findings()}
    assert [*found] == ["gated_delta", "linear_attention", "attention"]
    (finding,) = found["gated_delta"]
    assert (finding.implementation, finding.status, finding.wrong) == ("chunk", "right", False)
    assert finding.shape == "float32, 1/2 heads of 8 x 8"
    assert set(NAMES) < set(finding.errors)
    assert 0 < max(finding.errors.values()) <= finding.bound == 2e-6


def test_chunk_itself_wrong_is_the_worst(monkeypatch, wrong):
    monkeypatch.setattr(delta_case, "gated_delta_chunk", wrong)
    (finding,) = of_gated_delta()
    assert finding.wrong
    assert "differs from naive" in finding.detail


def test_a_refused_kernel_trains_nothing_wrong(on_a_gpu, wrong):
    on_a_gpu(wrong)
    finding = tried()
    assert (finding.status, finding.wrong) == ("refused", False)
    assert "by 1.0e-02 of the largest, 2.0e-06 allowed" in finding.detail


def test_a_refused_kernel_that_is_forced_would(on_a_gpu, wrong, monkeypatch):
    on_a_gpu(wrong)
    monkeypatch.setattr(Operator, "order", lambda operator: (("fused",), "forced"))
    assert [finding.status for finding in of_gated_delta()] == ["right", "wrong"]


def test_not_a_number_is_refused(on_a_gpu, wrong):
    on_a_gpu(lambda *arrays, **options: (wrong(*arrays, **options)[0] * mx.nan, options["initial_state"]))
    finding = tried()
    assert finding.status == "refused"
    assert finding.errors["y"] == math.inf


def test_uncovered_shape_has_a_reason(monkeypatch):
    monkeypatch.setitem(GATED_DELTA.orders, "cpu", ("fused", "chunk"))
    monkeypatch.setitem(GATED_DELTA.candidates, "fused", lambda call: "heads too odd")
    finding = tried()
    assert (finding.status, finding.detail) == ("not covered", "heads too odd")


@pytest.mark.parametrize(
    ("factor", "device", "status"),
    [
        (1.001, "cuda", "TF32"),
        pytest.param(1.001, "metal", "TF32", marks=pytest.mark.weekly),
        (1.01, "cuda", "wrong"),
        (1.001, "cpu", "wrong"),
    ],
)
def test_products_in_tf32_are_named_not_called_wrong(factor, device, status, monkeypatch):
    def rounded(*arrays, **options):
        y, state = gated_delta_chunk(*arrays, **options)
        return y * factor, state

    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(backend, "too_old", lambda: None)
    monkeypatch.setattr(delta_case, "MODELS", ())
    monkeypatch.setattr(delta_case, "gated_delta_chunk", rounded)
    (finding,) = of_gated_delta()
    assert finding.status == status
    assert ("unless MLX_ENABLE_TF32=0 is set" in finding.detail) == (status == "TF32")


def test_the_times_of_all_that_are_right(on_a_gpu, wrong, monkeypatch):
    assert implementations.times() == []
    ticks = itertools.count()
    monkeypatch.setattr(timing, "clock", lambda: 0.002 * next(ticks))
    monkeypatch.setattr(trial_case, "_TIMED_LENGTH", 16)
    monkeypatch.setattr(trial_case, "HEADS", trial_case.HEADS[3:4])
    on_a_gpu(gated_delta_chunk)
    monkeypatch.setattr(backend, "device", lambda: "metal")
    blocked = lambda call: Candidate(attention_blocked, call.shape_class("metal"), attention_blocked)  # noqa: E731
    for name in ("fused", "native"):
        monkeypatch.setitem(ATTENTION.candidates, name, lambda call: "not there")
        monkeypatch.setitem(GATED_DELTA.candidates, "native", lambda call: "not there")
    monkeypatch.setitem(ATTENTION.candidates, "blocked", blocked)
    monkeypatch.setattr(operators, "OPERATORS", (GATED_DELTA, ATTENTION))
    one, other = implementations.times()
    assert one.calls == "gated_delta, float32, 1/1 heads of 8 x 8"
    assert str(one) == "chunk 2.0 ms, fused 2.0 ms"
    assert other.calls == "attention, float32, heads of 64 x 64, grouped, causal, windowed, with sinks"
    assert str(other) == "blocked 2.0 ms"
    on_a_gpu(wrong)
    verdicts.again("gated_delta-fused", delta_case.MODELS[0], lambda: verdicts.Verdict("fused", "", 1.0))
    assert str(implementations.times()[0]) == "chunk 2.0 ms"
