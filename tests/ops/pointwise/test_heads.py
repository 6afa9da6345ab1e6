"""Heads before and behind attention: angles of late tokens, and defects planted into the kernels' text."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from host_machine import HostMachine, defects, plant, shows, some_daily

from against_float64 import drawn, errors
from deltatune.machine import backend
from deltatune.ops.kernels.launch import header, on
from deltatune.ops.pointwise import heads
from deltatune.ops.pointwise.heads import times_gate, turned_heads
from deltatune.ops.pointwise.passes import BODIES
from pass_definitions import reference_turned_heads

# The largest error over the largest element in fp32, as in test_passes.py.
BOUND = 4e-6
EPS, BASE = 1e-3, 1e4


def turned_errors(execute):
    """The errors of six heads of 64, all of which turns, and of their gates."""
    options = EPS, 64, BASE, True
    with on(execute):
        return errors(
            lambda x, w: turned_heads(x, w, *options),
            lambda x, w: reference_turned_heads(x, w, *options),
            drawn((2, 5, 6, 128), (64,)),
        )


def gate_errors(execute):
    arrays = drawn((2, 3, 7, 16), (2, 7, 3, 16))
    with on(execute):
        return errors(lambda y, gate: [times_gate(y, gate)], lambda y, gate: [y.swapaxes(1, 2) * gate], arrays)


def test_late_tokens_turn_by_the_angle_that_fp32_gives(execute):
    """An angle is off by its frequency's rounding and by its own, 2^-24 of it each; a sine by about 2^-23."""
    length, width, first = 3001, 32, 2900
    x, weight = drawn((1, length, 1, width), (width,))
    y = turned_heads(x, weight, EPS, width, BASE, False)[0]
    with mx.stream(mx.cpu):
        wide = [array.astype(mx.float64) for array in (x, weight)]
        exact = np.array(reference_turned_heads(*wide, EPS, width, BASE, False)[0])
    half = width // 2
    angles = np.outer(np.arange(length), BASE ** (-np.arange(half) / half))
    radius = np.hypot(exact[..., :half], exact[..., half:])
    allowed = radius * (angles * 2.0**-23 + 2.0**-22) + BOUND * np.abs(exact).max() / 4
    off = np.abs(np.array(y, np.float64) - exact)
    assert (off <= np.concatenate([allowed, allowed], axis=-1)).all()
    # The bound sees a position that is off by a thousandth.
    assert (allowed[0, 0, first:, 0] < 1e-3 * radius[0, 0, first:, 0]).mean() > 0.9


@pytest.mark.skipif(backend.device() == "cuda", reason="the host machine calls the function by itself")
def test_sines_of_large_angles(host_folder, monkeypatch):
    """At 262,144, the last position, an angle of fp32 is a multiple of 1/64; its sine is still right to fp32."""
    monkeypatch.setattr(heads, "frequencies", lambda *_: mx.array(frequencies))
    frequencies = np.linspace(2.0**16, 2.0**20, 16).astype(np.float32)
    execute = HostMachine(host_folder, header("metal", BODIES)).run
    x = mx.concatenate([mx.ones((1, 2, 1, 16)), mx.zeros((1, 2, 1, 16))], axis=-1)
    with on(execute):
        y = turned_heads(x, mx.ones((32,)), 0.0, 32, BASE, False)[0]
    angles = frequencies.astype(np.float64)
    exact = np.sqrt(2) * np.concatenate([np.cos(angles), np.sin(angles)])
    assert np.abs(np.array(y[0, 0, 1], np.float64) - exact).max() < np.sqrt(2) * 2.0**-22


TEXT = header("metal", BODIES)
# Of turned heads, and of the product with a gate.
DEFECTS, OF_GATES = defects("heads", TEXT), defects("heads, gates", TEXT)


@pytest.mark.skipif(backend.device() == "cuda", reason="the host machine runs the defects")
@pytest.mark.parametrize("defect", some_daily(DEFECTS | OF_GATES))
def test_planted_defects_are_seen(defect, host_folder):
    execute = HostMachine(host_folder, plant(TEXT, *(DEFECTS | OF_GATES)[defect])).run
    found = partial(gate_errors if defect in OF_GATES else turned_errors, execute)
    assert shows(lambda: not max(found()) < 10 * BOUND)
