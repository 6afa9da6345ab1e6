"""The choice by time: made timers, and implementations of attention with results that are chosen here."""

import dataclasses
import itertools
import json
import re

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.ops.attention import attention_blocked, choice, trial_case
from deltatune.ops.attention.trial_case import AttentionCall
from deltatune.ops.gated_delta import choice as gated_delta_choice
from deltatune.ops.gated_delta.trial_case import Call, ShapeClass
from deltatune.ops.operator import candidates, rankings, timing, verdicts
from deltatune.ops.operator.operator import Candidate

VARIABLE = "DELTATUNE_ATTENTION"
SHAPES = {"q": (1, 2, 5, 8), "k": (1, 1, 5, 8), "v": (1, 1, 5, 8)}


class Pretended:
    """Implementations on a machine that takes `milliseconds[name]`, one or each in turn; results are `blocked`'s.

    Those of `changing` differ from run to run within the check, those of `wrong` fail it, those of `failing_later`
    fail after it; `runs` counts.
    """

    def __init__(self) -> None:
        self.milliseconds: dict = {"fused": 3.0, "native": 2.0, "blocked": 9.0}
        self.changing, self.wrong, self.unsupported, self.failing_later = set(), set(), set(), set()
        self.runs = dict.fromkeys(self.milliseconds, 0)
        self._now, self._last = 0.0, ""

    def clock(self) -> float:
        """Tell the time; between two questions, the implementation that was asked last has run."""
        now = self._now
        if self._last:
            took = self.milliseconds[self._last]
            self._now += (next(took) if isinstance(took, itertools.cycle) else took) / 1e3
        return now

    def candidate(self, name: str, call: AttentionCall) -> Candidate | str:
        if name in self.unsupported:
            return "it is not there"

        def function(q, k, v, **options):
            self._last = name
            self.runs[name] += 1
            if name in self.failing_later and self.runs[name] > 1:
                raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")
            factor = 1 + 1e-7 * (self.runs[name] % 2) if name in self.changing else 1 + 1e-3 * (name in self.wrong)
            return attention_blocked(q, k, v, **options) * factor

        return Candidate(function, call.shape_class("metal"), function, trusted=name == "blocked")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    made = Pretended()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "device", lambda: "metal")
    monkeypatch.setattr(timing, "clock", made.clock)
    # The stand-in for a Mac times once.
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(trial_case, "_TIMED_LENGTH", 16)
    for name in made.milliseconds:
        monkeypatch.setitem(choice.OPERATOR.candidates, name, lambda call, name=name: made.candidate(name, call))
    monkeypatch.setattr(candidates, "_announced", set())
    verdicts.forget()
    yield made
    verdicts.forget()


def call(**changes) -> AttentionCall:
    given = {name: mx.zeros(shape) for name, shape in SHAPES.items()}
    given |= {"causal": True, "segments": None, "window": None, "sinks": None, "mask": None, "scale": 0.3}
    return AttentionCall(**given | changes)


def chosen(**changes) -> str:
    return candidates.choose(choice.OPERATOR, call(**changes))[0]


def test_the_fastest_right_one_serves_and_all_times_are_remembered(gpu, tmp_path, caplog):
    with caplog.at_level("INFO", logger=candidates.__name__):
        assert [chosen(), chosen()] == ["native"] * 2
    assert caplog.text.count("native (automatic on metal; fused 3.0 ms, native 2.0 ms, blocked 9.0 ms)") == 1
    stored = {path.name.rpartition("-")[0]: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    seconds = {name: each["verdict"]["seconds"] for name, each in stored.items()}
    assert seconds == pytest.approx({"attention-fused": 3e-3, "attention-native": 2e-3, "attention-blocked": 9e-3})
    before = dict(gpu.runs)
    assert chosen() == "native"
    assert gpu.runs == before
    # Another class of calls has times of its own.
    gpu.milliseconds["native"] = 100.0
    assert chosen(causal=False) == "fused"


def test_each_class_of_lengths_has_times_of_its_own(gpu, monkeypatch):
    """MLX's own blocked attention may lose in short rows and win in long ones."""
    timed = []
    plain = choice.OPERATOR.timed_case_of
    recorded = dataclasses.replace(choice.OPERATOR, timed_case_of=lambda shape: timed.append(shape) or plain(shape))
    monkeypatch.setattr(trial_case, "_LONGEST_TIMED", 16)
    for keys in (5, 3000, 2049, 9000):
        k = mx.zeros((1, 1, keys, 8))
        candidates.choose(recorded, call(k=k, v=k))
    assert [shape.longer_than for shape in timed] == [0, 2048, 8192]
    assert "causal, more than 2,048 keys" in call(k=mx.zeros((1, 1, 4096, 8))).words
    assert call(k=mx.zeros((1, 1, 4096, 8))).shape_class("cuda").longer_than == 0


def test_a_bad_moment_decides_for_the_first_start_alone(gpu, tmp_path):
    """Three processes take the time, and the shortest one stays; a later bad moment changes nothing either."""
    gpu.milliseconds["native"] = 100.0
    assert chosen() == "fused"
    gpu.milliseconds["native"] = 2.0
    verdicts.forget()
    assert chosen() == "native"
    gpu.milliseconds["native"] = 50.0
    for _ in range(2):
        verdicts.forget()
        assert chosen() == "native"
        before = dict(gpu.runs)
        assert chosen() == "native"
        assert gpu.runs == before
    (stored,) = (json.loads(path.read_text())["verdict"] for path in tmp_path.rglob("attention-native-*.json"))
    assert stored["seconds"] == pytest.approx(2e-3)
    assert len(stored["moments"]) == 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d, load \d+\.\d", moment) for moment in stored["moments"])


def test_atomic_sums_are_never_steady(gpu, monkeypatch):
    """Three runs of a small case may agree by chance."""
    atomic = lambda call: dataclasses.replace(gpu.candidate("native", call), atomics=True)  # noqa: E731
    monkeypatch.setitem(choice.OPERATOR.candidates, "native", atomic)
    assert chosen() == "fused"


def test_mlxs_own_gradient_of_the_gated_delta_rule_is_atomic_on_metal(gpu):
    call = Call.of_class(ShapeClass(16, 32, 128, 128, "bfloat16"))
    assert gated_delta_choice.OPERATOR.candidates["native"](call).atomics


def test_a_gain_below_a_tenth_changes_nothing(gpu):
    gpu.milliseconds |= {"native": 2.8}
    assert chosen() == "fused"


def test_the_outlier_of_a_busy_machine_changes_nothing(gpu):
    gpu.milliseconds["native"] = itertools.cycle([400.0, 400.0, 2.0, 2.0])
    assert chosen() == "native"


def test_bits_that_change_rule_one_out_unless_it_is_asked_for(gpu, monkeypatch, caplog):
    gpu.changing.add("native")
    with caplog.at_level("INFO", logger=candidates.__name__):
        assert chosen() == "fused"
        assert f"native 2.0 ms (its bits change), blocked 9.0 ms; {VARIABLE}=native uses it all the same" in caplog.text
        # A choice that is asked for is tried, and said, too.
        monkeypatch.setenv(VARIABLE, "fused")
        gpu.changing.add("fused")
        tried_anew(gpu, "fused")
        assert chosen() == "fused"
    assert f"attention: fused (forced by {VARIABLE}; fused 3.0 ms (its bits change))" in caplog.text


def tried_anew(gpu: Pretended, name: str) -> None:
    candidates.verdict_anew(choice.OPERATOR, name, gpu.candidate(name, call()))


def test_a_wrong_one_is_not_timed(gpu):
    gpu.wrong.add("native")
    assert chosen() == "fused"
    assert gpu.runs["native"] == 1
    gpu.unsupported.add("fused")
    assert chosen() == "blocked"


def test_one_that_cannot_be_timed_does_not_serve(gpu):
    gpu.failing_later.add("native")
    assert chosen() == "fused"


def test_a_run_keeps_its_choices(gpu):
    key = "attention, float32, heads of 8 x 8, grouped, causal"
    with rankings.of_run() as run:
        assert chosen() == "native"
        assert run.names == {key: ["native", "fused", "blocked"]}
        assert "native 2.0 ms" in run.reasons[key]
        # A verdict that is measured anew, by doctor say, and other times change nothing half-way.
        gpu.milliseconds["native"] = 50.0
        tried_anew(gpu, "native")
        assert chosen() == "native"
        # A call of the class that it does not support goes to the next one.
        gpu.unsupported.add("native")
        assert chosen() == "fused"
        gpu.unsupported.clear()
    assert chosen() == "fused"
    with rankings.of_run() as continued:
        continued.continue_with({key: ["native", "fused", "blocked"]})
        assert chosen() == "native"
        assert continued.reasons[key] == "as in the run that is continued"
        # The last in the order of preference may be the first in the run's.
        continued.continue_with({key: ["blocked", "native", "fused"]})
        assert chosen() == "blocked"
        continued.continue_with({key: ["native", "fused", "blocked"]})
        # What a continuation has chosen and is wrong here, after an update of the system say, does not serve.
        gpu.wrong.add("native")
        tried_anew(gpu, "native")
        with pytest.warns(candidates.ImplementationWarning, match="native .* differs from float64"):
            assert chosen() == "fused"


def test_without_times_a_run_keeps_implementations_that_passed(gpu, monkeypatch):
    """On CUDA the order was measured, and on ranks it is known."""
    gpu.wrong.add("fused")
    monkeypatch.setattr(backend, "_UNMEASURED", ())
    with rankings.of_run() as run, pytest.warns(candidates.ImplementationWarning, match="fused .* differs"):
        assert chosen() == "native"
    assert list(run.names.values()) == [["native", "blocked"]]
    monkeypatch.setattr(backend, "_UNMEASURED", ("metal",))
    gpu.wrong.clear()
    with rankings.of_run() as run:
        run.by_time = False
        tried_anew(gpu, "fused")
        assert chosen() == "fused"
    assert list(run.names.values()) == [["fused", "native", "blocked"]]


def test_a_continuation_on_another_device_takes_its_implementations(gpu, monkeypatch):
    monkeypatch.setitem(choice.OPERATOR.orders, "metal", ("fused", "blocked"))
    with rankings.of_run() as run:
        run.continue_with({"attention, float32, heads of 8 x 8, grouped, causal": ["native", "blocked", "fused"]})
        assert chosen() == "fused"


def test_times_are_ranked():
    order, ranked = ["fused", "native", "chunk"], timing.fastest_first
    assert ranked({"fused": 1.0, "native": 0.95, "chunk": 0.99}, order) == order
    assert ranked({"fused": 1.0, "native": 0.95, "chunk": 0.5}, order) == [
        "chunk",
        "fused",
        "native",
    ]
    assert ranked({"native": 2.0, "chunk": 1.0}, order) == ["chunk", "native"]
