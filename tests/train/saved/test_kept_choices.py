"""A run keeps its choices, in its state and in its continuations. test_distributed.py has the ranks."""

from types import SimpleNamespace

import pytest

from deltatune.machine import backend, compiling
from deltatune.ops.gated_delta import choice, gated_delta_chunk
from deltatune.ops.operator import timing, verdicts
from deltatune.ops.operator.operator import Candidate
from deltatune.train.saved import state
from killed_runs import adapters


@pytest.fixture
def unmeasured(monkeypatch, tmp_path):
    """A machine without a measured order of preference, with `other`, which differs from chunk in last bits.

    `seconds[name]` is how long either takes, and `traced[name]` how often it was put into a graph.
    """
    seconds, traced, last = {"other": 1.0, "chunk": 2.0}, {"other": 0, "chunk": 0}, [""]
    now = [0.0]

    def clock():
        now[0] += seconds.get(last[0], 0.0)
        return now[0]

    def named(name):
        def function(q, k, v, *arrays, **options):
            last[0] = name
            traced[name] += 1
            factor = 1 + 2e-7 * (name == "other")
            return gated_delta_chunk(q, k, v * factor, *arrays, **options)

        return lambda call: Candidate(function, call.shape_class(), function, trusted=name == "chunk")

    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(choice.OPERATOR.orders, "cpu", ("other", "chunk"))
    monkeypatch.setattr(backend, "_UNMEASURED", ("cpu",))
    monkeypatch.setattr(timing, "clock", clock)
    for name in seconds:
        monkeypatch.setitem(choice.OPERATOR.candidates, name, named(name))
    verdicts.forget()
    # Times are those of this clock, so that g++ need not build MLX's kernels for each.
    with compiling.without_kernels():
        yield SimpleNamespace(seconds=seconds, traced=traced)
    verdicts.forget()


def kept(folder) -> dict[str, list[str]]:
    found = state.peek(state.state_path(folder)).implementations
    return {key: names for key, names in found.items() if key.startswith("gated_delta, float32, ")}


def test_a_continuation_takes_the_choices_of_its_run(unmeasured, make_trainer, screen_text, tmp_path):
    # Adam's first updates would hide last bits.
    short = {"val_batches": 0, "grad_accumulation_steps": 1, "optimizer": "sgd"}
    make_trainer(adapter_path=str(tmp_path / "straight"), iters=2, **short).run()
    make_trainer(iters=1, **short).run()
    ((key, names),) = kept(tmp_path / "out").items()
    assert names == ["other", "chunk"]
    # At the next start chunk is faster, and nothing is remembered.
    unmeasured.seconds["other"] = 9.0
    (tmp_path / "cache").rename(tmp_path / "gone")
    verdicts.forget()
    traced = unmeasured.traced["chunk"]
    make_trainer(iters=2, resume=True, **short).run()
    assert unmeasured.traced["chunk"] == traced
    assert f"{key}: other (as in the run that is continued).\n" in screen_text.text()
    assert adapters(tmp_path / "out") == adapters(tmp_path / "straight")
    # A new run takes the faster one, whose bits are others.
    make_trainer(adapter_path=str(tmp_path / "new"), iters=2, **short).run()
    assert kept(tmp_path / "new") == {key: ["chunk", "other"]}
    assert adapters(tmp_path / "new") != adapters(tmp_path / "straight")
