"""A compiled function that raises leaves the arrays that it reads as they were, and works afterwards."""

import sys
import threading
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from beside import load
from deltatune.machine import backend
from deltatune.ops.kernels import cubin, nvrtc
from deltatune.ops.operator.case import Case, judged
from deltatune.ops.pointwise.silu import swiglu
from deltatune.ops.random_state import drawing_with
from deltatune.train.compiled import Compiled

gpu = load(Path(__file__).parents[1] / "ops" / "kernels" / "pretended_gpu.py").gpu


def test_an_error_leaves_the_arrays_and_the_key():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    state = {"step": mx.array(1), "moments": [mx.ones(2), {"of": mx.zeros(3)}]}
    model.train()
    captured = [model.state, state, [mx.random.key(0)]]

    def function(x):
        state["step"] = state["step"] + 1
        with drawing_with(captured[2]):
            if x.shape[0] == 2:
                model(x)
                model.layers[0].added = state["moments"] = [state["moments"][0] + 1, {"of": mx.ones(3)}]
                raise ValueError("two rows")
            return model(x)

    call = Compiled(function, captured, captured[1:])
    call(mx.ones((1, 3)))
    weight, moment, key = model.layers[0].weight, state["moments"][1]["of"], captured[2][0]
    with pytest.raises(ValueError, match="two rows"):
        call(mx.ones((2, 3)))
    assert model.layers[0].weight is weight
    assert state["moments"][1]["of"] is moment
    assert "added" not in model.layers[0]
    assert captured[2][0] is key
    assert state["step"].item() == 2
    mx.eval(model.parameters(), captured)
    assert call(mx.ones((3, 3))).shape == (3, 2)
    assert state["step"].item() == 3


def test_a_function_that_reads_values_runs_uncompiled_and_says_so():
    model = nn.Linear(2, 2)
    state = {"calls": mx.array(0)}

    def function(x):
        state["calls"] = state["calls"] + 1
        # As mlx-lm's dbrx finds the rows of an expert.
        return model(x[mx.array(np.flatnonzero(np.array(x[:, 0] > 0)))])

    call = Compiled(function, [model.state, state], [state])
    rows = mx.array([[1.0, 2.0], [-1.0, 2.0]])
    with pytest.warns(RuntimeWarning, match="cannot compile it"):
        first = call(rows)
    assert mx.array_equal(first, model(rows[:1]))
    assert call(-rows).shape == (1, 2)
    assert state["calls"].item() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")
def test_the_first_call_builds_its_kernels_side_by_side(gpu, monkeypatch):
    """Each of the two kernels is finished when both are being built; a trial within the call launches its own."""
    both, built_alone, launched, state = threading.Barrier(2), nvrtc.compiled, [], [mx.random.key(0)]

    def together(*arguments):
        both.wait(60)
        return built_alone(*arguments)

    def tried(_):
        launched.append(not cubin.building())
        return [mx.ones(2)]

    def function(gate):
        with drawing_with(state):
            judged(Case("a case", ("y",), lambda call: call(gate), lambda: [np.ones(2)], 1e-3), tried, "an operator")
            return mx.vjp(lambda gate: [swiglu(gate, gate)], [gate], [mx.random.uniform(shape=gate.shape)])[1]

    monkeypatch.setattr(nvrtc, "compiled", together)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    call, drawn = Compiled(function, [state], [state]), [mx.random.key(0)]
    for _ in range(2):
        call(mx.ones((2, 16)))
        with drawing_with(drawn):
            mx.random.uniform(shape=(2, 16))
    assert sorted(gpu.compiled) == ["swiglu_backward", "swiglu_forward"]
    # A trial builds its kernels first, and then launches them.
    assert launched == [False, True] * 2
    assert mx.array_equal(state[0], drawn[0])
