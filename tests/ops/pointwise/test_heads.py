"""Heads before and behind attention: values and gradients against float64, planted defects, and refusals."""

from functools import partial, partialmethod

import mlx.core as mx
import numpy as np
import pytest
from host_machine import HostMachine, plant, shows

from against_float64 import drawn, errors, with_gradients
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.kernels.launch import header, on
from deltatune.ops.operator import first_use
from deltatune.ops.pointwise import heads, times_gate, turned_heads
from deltatune.ops.pointwise.passes import BODIES, Passes
from pass_definitions import reference_turned_heads
from two_dtypes import in_two_dtypes

# The largest error over the largest element: that of fp32 sums of up to 256 terms, of which a gradient has two, and of
# angles below 16; or that of one rounding to the dtype.
BOUND = {mx.float32: 4e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
EPS, BASE = 1e-3, 1e4
# The width of a head, its rotary dimensions, heads, tokens, and whether there are gates.
CASES = {
    "eight heads of 32, gates": (32, 16, 8, 5, True),
    "one head of 32, all of it turns": (32, 32, 1, 7, False),
    "six heads of 64, gates, all of it turns": (64, 64, 6, 5, True),
    "one token of two heads of 16": (16, 16, 2, 1, True),
    "three heads of 128": (128, 32, 3, 3, False),
    "four heads of 256, gates": (256, 64, 4, 3, True),
    "two heads of 256, all of it turns": (256, 256, 2, 15, False),
}
SMALL = "eight heads of 32, gates"


def given(case, dtype=mx.float32, batch=2):
    """x and the weight of a case, and its options."""
    width, rotary_dims, count, length, gated = CASES[case]
    x, weight = drawn((batch, length, count, width * (2 if gated else 1)), (width,), dtype=dtype)
    return [x, weight], (EPS, rotary_dims, BASE, gated)


def turned_errors(case, execute, dtype=mx.float32, spread=1.0):
    (x, weight), options = given(case, dtype)
    with on(execute):
        return errors(
            lambda x, w: turned_heads(x, w, *options),
            lambda x, w: reference_turned_heads(x, w, *options),
            [spread * x, weight],
        )


def gate_errors(execute, dtype=mx.float32, width=40):
    arrays = drawn((2, 3, 7, width), (2, 7, 3, width), dtype=dtype)
    with on(execute):
        return errors(lambda y, gate: [times_gate(y, gate)], lambda y, gate: [y.swapaxes(1, 2) * gate], arrays)


@pytest.mark.parametrize(("case", "dtype"), in_two_dtypes(CASES))
def test_turned_heads_against_float64(case, dtype, execute):
    for spread in (1.0, 20.0):
        found = turned_errors(case, execute, dtype, spread)
        assert max(found) < BOUND[dtype], found


@pytest.mark.parametrize("dtype", BOUND, ids=lambda dtype: str(dtype).split(".")[-1])
@pytest.mark.parametrize("width", [8, 40])
def test_the_gates_product_against_float64(width, dtype, execute):
    found = gate_errors(execute, dtype, width)
    assert max(found) < BOUND[dtype], found


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
    allowed = radius * (angles * 2.0**-23 + 2.0**-22) + BOUND[mx.float32] * np.abs(exact).max() / 4
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


# Each defect: the text, what replaces it, and whether the product with the gate has it.
DEFECTS = {
    "the other direction": ("first == back ? sine : -sine", "first == back ? -sine : sine", False),
    "the same direction back": ("own.t, frequencies, true)", "own.t, frequencies, false)", False),
    "another partner": ("lane_exchange(h[i], ROTARY / 16)", "lane_exchange(h[i], ROTARY / 8)", False),
    "the frequencies of a neighbour": ("first ? piece : piece - half_lanes", "0", False),
    "a quarter's sign": ("(quarter + 1) & 2", "quarter & 2", False),
    "positions that run on into the next row": ("token % (unsigned)length)", "token)", False),
    "the heads as the gate": (
        "fetch(gates[n], x, ((own.by_token + n) * parts + 1)",
        "fetch(gates[n], x, ((own.by_token + n) * parts)",
        False,
    ),
    "y in the order of tokens": ("give(y, (own.by_head + (long)n * length)", "give(y, (own.by_token + n)", False),
    "dy in the order of tokens": (
        "fetch(d[n], dy, (own.by_head + (long)n * length)",
        "fetch(d[n], dy, (own.by_token + n)",
        False,
    ),
    "the next token as the next head": ("give(y, (own.by_head + (long)n * length)", "give(y, (own.by_head + n)", False),
    "no weight in the gradient": ("u[i] *= w[i];", ";", False),
    "attention's output in the order of tokens": ("take(h, y, own.by_head", "take(h, y, own.by_token", True),
    "its gradient in the order of tokens": ("give(dy, own.by_head", "give(dy, own.by_token", True),
}


@pytest.mark.skipif(backend.device() == "cuda", reason="the host machine runs the defects")
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_seen(defect, host_folder):
    *replaced, of_gate = DEFECTS[defect]
    execute = HostMachine(host_folder, plant(header("metal", BODIES), *replaced)).run
    case = "six heads of 64, gates, all of it turns"
    found = partial(gate_errors, execute, width=16) if of_gate else partial(turned_errors, case, execute)
    assert shows(lambda: not max(found()) < 10 * BOUND[mx.float32])


def test_inputs_with_other_strides_and_odd_offsets(execute):
    (x, weight), options = given(SMALL, mx.bfloat16)
    odd = mx.concatenate([mx.zeros((1,), x.dtype), x.reshape(-1)])[1:].reshape(x.shape)
    other = mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
    cotangents = drawn((2, 8, 5, 32), (2, 5, 8, 32), dtype=x.dtype)
    turned = partial(turned_heads)
    wanted = with_gradients(lambda x: turned(x, weight, *options), [x], cotangents)
    cotangents[0] = mx.contiguous(cotangents[0].swapaxes(1, 2)).swapaxes(1, 2)
    for each in (odd, other):
        found = with_gradients(lambda x: turned(x, weight, *options), [each], cotangents)
        assert all(mx.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_one_launch_forward_and_one_backward(execute):
    (x, weight), options = given(SMALL)
    launches = []

    def counted(launch):
        launches.append(launch.name)
        return execute(launch)

    def loss(x):
        y, gate = turned_heads(x, weight, *options)
        return times_gate(y, gate).sum()

    with on(counted):
        mx.eval(mx.grad(loss)(x))
    names = ("turned_heads_forward", "times_gate_forward", "times_gate_backward", "turned_heads_backward")
    assert launches == list(names)


def test_refuses_what_does_not_fit():
    (x, weight), (*_, gated) = given(SMALL)
    for shape, width, rotary_dims, gate in (
        (x.shape[1:], 32, 16, gated),
        (x.shape, 32, 16, False),
        (x.shape, 32, 64, gated),
        (x.shape, 32, 24, gated),
        (x.shape, 32, 8, gated),
        ((2, 5, 8, 96), 96, 16, False),
        ((2, 0, 8, 64), 32, 16, gated),
    ):
        with pytest.raises(ValueError, match="turned_heads: x"):
            turned_heads(mx.zeros(shape), mx.zeros((width,)), EPS, rotary_dims, BASE, gate)
    with pytest.raises(ValueError, match="turned_heads: x"):
        turned_heads(x.astype(mx.int32), weight, EPS, 16, BASE, gated)
    y = mx.zeros((2, 3, 5, 16))
    for gate in (y, mx.zeros((2, 5, 3, 16), mx.bfloat16), mx.zeros((2, 5, 3, 12))):
        with pytest.raises(ValueError, match="times_gate: y"):
            times_gate(y, gate)


def test_kernels_are_tried_before_their_first_use(execute, monkeypatch):
    monkeypatch.setattr(Passes, "passes_trial", partialmethod(Passes.passes_trial, device=execute))
    monkeypatch.setattr(first_use, "_right", {})
    (x, weight), options = given(SMALL)
    y, gate = drawn((2, 8, 5, 32), (2, 5, 8, 32))
    assert not heads.serves(x, weight, *options)  # They have too few elements.
    assert not heads.serves_gate(y, gate)
    monkeypatch.setattr(recomputation, "LEAST", 0)
    assert heads.serves(x, weight, *options)
    assert heads.serves(x[..., :32], weight, EPS, 16, BASE, False)
    assert heads.serves_gate(y, gate)
    assert not heads.serves(x, weight, EPS, 24, BASE, True)
    assert not heads.serves_gate(y, y)
    assert len(first_use._right) == 3


@pytest.mark.parametrize("name", ["turned_heads_forward", "turned_heads_backward", "times_gate_backward"])
def test_a_kernel_that_is_wrong_is_not_used(name, execute, monkeypatch):
    (x, weight), options = given(SMALL)
    y, gate = drawn((2, 8, 5, 32), (2, 5, 8, 32))

    def wrong(launch):
        found = execute(launch)
        return [array * 1.001 for array in found] if launch.name == name else found

    monkeypatch.setattr(recomputation, "LEAST", 0)
    monkeypatch.setattr(Passes, "passes_trial", partialmethod(Passes.passes_trial, device=wrong))
    monkeypatch.setattr(first_use, "_right", {})
    assert heads.serves(x, weight, *options) is (name == "times_gate_backward")
    assert heads.serves_gate(y, gate) is (name != "times_gate_backward")
