"""The forward and backward kernels against float64 on the host machine; their refusals; their trial before use."""

import logging
from dataclasses import replace
from functools import partial, partialmethod

import mlx.core as mx
import numpy as np
import pytest

from against_float64 import drawn, errors
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.operator import first_use
from deltatune.ops.pointwise import conv, conv_silu, gated_norm, gates, gating, norm, norm_and_gate, norms, silu, swiglu
from deltatune.ops.pointwise.passes import Passes
from deltatune.ops.pointwise.silu import _backward, _forward, _plain
from pass_definitions import inverse_rms, reference_conv, reference_gates
from two_dtypes import in_two_dtypes

# The largest error over the largest element: that of fp32 sums of 256 terms and an exponential, or of rounding.
BOUND = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def documents(length):
    """Segments of one token, of a few tokens, and of more tokens than a lane computes."""
    return mx.array(np.searchsorted([1, 4, 9, 20], np.arange(length), side="right"))[None].astype(mx.int32)


def conv_case(batch, length, channels, taps, segmented):
    def ours(x, weight):
        segments = mx.broadcast_to(documents(length), (batch, length)) if segmented else None
        return conv_silu(x, weight, segments)

    owner = np.array(documents(length))[0] if segmented else None
    shapes = [(batch, taps - 1 + length, channels), (channels, taps)]
    return ours, lambda x, weight: reference_conv(x, weight, length, owner), shapes


def rows(width):
    return [(5, 27, width)] * 2


CASES = {
    "swiglu": (swiglu, lambda g, x: g * mx.sigmoid(g) * x, rows(40)),
    **{
        f"norm of {width}": (
            partial(norm, factor=0.25, eps=1e-3),
            lambda x: 0.25 * x * inverse_rms(x, 1e-3),
            [(5, 27, width)],
        )
        for width in (8, 64, 256)
    },
    **{
        f"gated norm of {width}": (
            lambda x, g, w: gated_norm(x, w, g, 1e-6),
            lambda x, g, w: x * inverse_rms(x, 1e-6) * w * g * mx.sigmoid(g),
            [*rows(width), (width,)],
        )
        for width in (16, 128)
    },
    **{
        f"norm and gate of {width}": (
            lambda x, w: norm_and_gate(x, w, 1e-3),
            lambda x, w: (
                x[..., : w.size] * inverse_rms(x[..., : w.size], 1e-3) * w,
                mx.sigmoid(x[..., w.size :]),
            ),
            [(3, 9, 2 * width), (width,)],
        )
        for width in (8, 64, 256)
    },
    "conv": conv_case(2, 19, 24, 4, False),
    "conv of one token": conv_case(1, 1, 8, 4, False),
    "conv of two taps": conv_case(3, 8, 16, 2, False),
    "conv of documents": conv_case(2, 27, 16, 4, True),
    "gates": (gates, reference_gates, [(2, 75, 3), (2, 75, 3), (3,), (3,)]),
    "gates with beta up to 2": (
        partial(gates, largest_beta=2.0),
        partial(reference_gates, largest_beta=2.0),
        [(4, 16)] * 2 + [(16,)] * 2,
    ),
}


@pytest.mark.parametrize(("case", "dtype"), in_two_dtypes(CASES))
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_value_and_gradients_against_float64(case, spread, dtype, execute):
    function, reference, shapes = CASES[case]
    # Parameters have one axis.
    arrays = [array * (spread if array.ndim > 1 else 1.0) for array in drawn(*shapes, dtype=dtype)]
    found = errors(function, reference, arrays)
    assert max(found) < BOUND[dtype], found


def test_a_gate_close_to_zero_is_accurate(execute):
    a, b, A_log, dt_bias = drawn((4, 8), (4, 8), (8,), (8,))
    log_g, _ = gates(a - 14, b, A_log, dt_bias)
    exact = -np.exp(np.array(A_log, np.float64)) * np.log1p(np.exp(np.array(a, np.float64) - 14 + np.array(dt_bias)))
    assert np.abs(np.array(log_g) / exact - 1).max() < 1e-5


def test_arrays_with_other_strides_and_odd_offsets(execute):
    (x,) = drawn((3, 10, 64))
    transposed = x.swapaxes(0, 1)
    found, expected = (norm(y, 1.0, 1e-6) for y in (transposed, mx.contiguous(transposed)))
    assert mx.array_equal(found, expected)
    flat = drawn((65,))[0]
    offset, copied = flat[1:], mx.contiguous(flat[1:])
    assert mx.array_equal(swiglu(offset, offset), swiglu(copied, copied))


def test_compiled_and_checkpointed(execute):
    x, g, w = drawn(*rows(64), (64,))

    def loss(x, g, w):
        return swiglu(gated_norm(x, w, g, 1e-6), x).square().sum()

    expected = mx.grad(loss, argnums=(0, 1, 2))(x, g, w)
    if backend.device() == "cuda":
        found = mx.compile(mx.grad(loss, argnums=(0, 1, 2)))(x, g, w)
        assert all(mx.array_equal(one, other) for one, other in zip(expected, found, strict=True))
    (again,) = mx.vjp(mx.checkpoint(loss), [x, g, w], [mx.ones(())])[1][:1]
    assert mx.array_equal(again, expected[0])


def test_gradients_of_parameters_close_over_no_array(execute, monkeypatch):
    """mx.vjp walks through all that a closed-over array was computed from: the whole step, for each piece of a row."""
    function, _, shapes = CASES["gates"]
    arrays, differentiate, closed = drawn(*shapes), mx.vjp, []

    def watched(inner, primals, cotangents):
        closed.append([cell.cell_contents for cell in inner.__closure__ or ()])
        return differentiate(inner, primals, cotangents)

    monkeypatch.setattr(mx, "vjp", watched)
    differentiate(lambda *arrays: list(function(*arrays)), arrays, [mx.ones_like(y) for y in function(*arrays)])
    assert closed
    assert not [item for cells in closed for item in cells if isinstance(item, (mx.array, list, tuple))]


def test_no_second_derivative(execute):
    (x,) = drawn((2, 64))
    with pytest.raises(NotImplementedError, match="swiglu has no second derivative"):
        mx.grad(lambda x: mx.grad(lambda x: swiglu(x, x).sum())(x).sum())(x)


def test_refuses_what_does_not_fit():
    x, y, short = drawn((2, 64), (2, 32), (2, 12))
    with pytest.raises(ValueError, match="one shape and dtype"):
        swiglu(x, y)
    with pytest.raises(ValueError, match=r"W one of \(8, 16"):
        norm(short, 1.0, 1e-6)
    with pytest.raises(ValueError, match=r"gated_norm: x \(2, 64\)"):
        gated_norm(x, y[0], x, 1e-6)
    with pytest.raises(ValueError, match=r"norm_and_gate: x \(2, 64\)"):
        norm_and_gate(x, x[0], 1e-6)
    with pytest.raises(ValueError, match="gates: a"):
        gates(x, x, y[0], y[0])


def test_a_kernel_that_is_wrong_or_fails_is_not_used(execute, caplog):
    def wrong(gate, x, dy):
        launch = _backward(gate, x, dy)
        return replace(launch, inputs={**launch.inputs, "dy": dy * 1.2})

    def fails(*_):
        raise RuntimeError("no compiler")

    for i, (backward, warning) in enumerate(((_backward, None), (wrong, "off by"), (fails, "no compiler"))):
        passes = Passes(f"swiglu {i}", _forward, backward, _plain)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert passes.passes_trial(*[((96, 8), mx.float32)] * 2, device=execute) is (warning is None)
            assert (warning or "") in caplog.text


def test_every_kernel_is_tried_on_small_arrays_of_its_kind(execute, monkeypatch):
    monkeypatch.setattr(Passes, "passes_trial", partialmethod(Passes.passes_trial, device=execute))
    monkeypatch.setattr(first_use, "_right", {})
    for module in (recomputation, gating, conv):
        monkeypatch.setattr(module, "LEAST", 0)
    x, g, w, taps = drawn((2, 9, 64), (2, 9, 64), (64,), (64, 4))
    assert silu.serves(x, g)
    assert norms.norm_serves(x, 0.5, 1e-6)
    assert norms.gated_norm_serves(x, w, g, 1e-6)
    assert norms.norm_and_gate_serves(x, w[:32], 1e-6)
    assert gating.serves(x, g, w, w)
    assert gating.serves(x, g, w, w, 2.0)
    assert conv.serves(x, taps)
    assert conv.serves(x, taps, mx.zeros((2, 6), mx.int32))
    assert not silu.serves(x, g[:1])
    assert not norms.norm_serves(x[..., :12], 0.5, 1e-6)
    assert not gating.serves(x, g, w[:3], w)
    assert not conv.serves(x, w[:, None])
    assert not norms.norm_and_gate_serves(x, w, 1e-6)
    assert len(first_use._right) == 8


def test_few_elements_are_not_worth_building_kernels(monkeypatch):
    monkeypatch.setattr(Passes, "passes_trial", lambda *_, **__: pytest.fail("built"))
    x, g, w, taps = drawn((2, 9, 64), (2, 9, 64), (64,), (64, 4))
    assert not silu.serves(x, g)
    assert not norms.norm_serves(x, 0.5, 1e-6)
    assert not norms.gated_norm_serves(x, w, g, 1e-6)
    assert not norms.norm_and_gate_serves(x, w[:32], 1e-6)
    assert not conv.serves(x, taps)
    assert not gating.serves(x[:1, :1], g[:1, :1], w, w)
