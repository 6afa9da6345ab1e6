"""The kernel of one token of a gated-delta layer against its definition, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.decoding.delta_token import (
    BOUNDS,
    KERNEL,
    DeltaToken,
    TokenArrays,
    covers,
    delta_token,
    serves,
    trial_case,
)
from deltatune.ops.gated_delta import float64
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import judged
from deltatune.ops.pointwise.conv import NormedHeads


def layer_of(key_heads: int, value_heads: int, key_size: int, value_size: int) -> DeltaToken:
    heads = NormedHeads(key_heads, key_size, 1 / key_size, key_size**-0.5, 1e-6 / key_size)
    return DeltaToken(heads, value_heads, value_size, 1e-6)


# Value heads to a key head, sizes of heads, taps, and whether the projections are one array.
CASES = [
    (layer_of(1, 1, 128, 128), 4, True),
    (layer_of(2, 4, 32, 24), 4, False),
    (layer_of(1, 3, 64, 40), 3, True),
    (layer_of(2, 2, 16, 8), 2, False),
    (layer_of(1, 2, 256, 16), 3, False),
]


def kinds(dtype: mx.Dtype, others: mx.Dtype) -> tuple[tuple[str, mx.Dtype], ...]:
    return ("before", dtype), ("taps", dtype), ("dt_bias", others), ("weight", others)


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).split(".")[-1])
def test_a_token_is_that_of_the_definition(number, dtype, running):
    layer, taps, whole = CASES[number]
    case = trial_case(layer, whole, taps, kinds(dtype, mx.float32 if number % 2 else dtype))
    verdict = judged(case, running(KERNEL), "kernel")
    assert verdict.passed, (verdict.errors, verdict.problem)


def arrays_of(layer: DeltaToken, rows: int = 2, taps: int = 4) -> TokenArrays:
    keys = iter(mx.random.split(mx.random.key(3), 12))
    drawn = lambda *shape: mx.random.normal(shape, key=next(keys))  # noqa: E731
    projected = tuple(drawn(rows, width) for width in layer.widths)
    heads, channels = layer.value_heads, layer.channels
    state = drawn(rows, heads, layer.value_size, layer.heads.size)
    others = drawn(channels, taps), drawn(heads), drawn(heads), drawn(layer.value_size)
    return TokenArrays(projected, drawn(rows, taps - 1, channels), state, *others)


def test_the_recurrence_steps_as_in_float64(running):
    """Operations around the recurrence are taken out: taps that pass x on, factors of 1 and no gates of the output."""
    layer = layer_of(1, 2, 32, 16)
    given = arrays_of(layer, rows=1, taps=2)
    x, _, b, a = given.projected
    given = replace(given, taps=mx.broadcast_to(mx.array([0.0, 1.0]), (layer.channels, 2)), weight=mx.ones(16))
    with on(running(KERNEL)):
        y, _, state = delta_token(layer, given)
    wide = {name: np.array(array, np.float64) for name, array in (("x", x), ("b", b), ("a", a))}
    silu = wide["x"] / (1 + np.exp(-wide["x"]))
    q, k, v = silu[:, :32], silu[:, 32:64], silu[:, 64:].reshape(1, 1, 2, 16)
    q, k = (part / np.sqrt((part**2).sum() + 1e-6) for part in (q, k))
    rate = np.log1p(np.exp(wide["a"] + np.array(given.dt_bias, np.float64)))
    inputs = {
        "q": (q * 32**-0.5).reshape(1, 1, 1, 32),
        "k": k.reshape(1, 1, 1, 32),
        "v": v,
        "log_g": (-np.exp(np.array(given.A_log, np.float64)) * rate)[:, None],
        "beta": (1 / (1 + np.exp(-wide["b"])))[:, None],
        "initial_state": np.array(given.state, np.float64),
        "mask": None,
        "segments": None,
    }
    truth = float64.recurrence(inputs, np.zeros((1, 1, 2, 16)), np.zeros_like(inputs["initial_state"]))
    # 32 products are summed in fp32, twice.
    assert np.abs(np.array(state) - truth["state"]).max() < 2**-18 * np.abs(truth["state"]).max()
    out = truth["y"][:, 0] / np.sqrt((truth["y"][:, 0] ** 2).mean(axis=-1, keepdims=True) + 1e-6)
    z = np.array(given.projected[1], np.float64).reshape(1, 2, 16)
    expected = (out * z / (1 + np.exp(-z))).reshape(1, 32)
    assert np.abs(np.array(y) - expected).max() < 2**-17 * np.abs(expected).max()


def test_a_wrong_kernel_is_refused(running):
    layer, taps, whole = CASES[1]

    def wrong(launch: Launch) -> list[mx.array]:
        y, after, state = running(KERNEL)(launch)
        return [y, after, state * 1.001]

    verdict = judged(trial_case(layer, whole, taps, kinds(mx.float32, mx.float32)), wrong, "kernel")
    assert not verdict.passed
    assert verdict.worst == "state"


def test_other_shapes_are_refused():
    layer = layer_of(2, 4, 32, 24)
    given = arrays_of(layer)
    assert covers(layer, given)
    refused = [
        replace(given, state=given.state[:, :1]),
        replace(given, taps=given.taps[:, :1]),
        replace(given, before=given.before.astype(mx.bfloat16)),
        replace(given, A_log=given.A_log.astype(mx.bfloat16)),
        replace(given, projected=given.projected[::-1]),
    ]
    for each in refused:
        assert not covers(layer, each)
        with pytest.raises(ValueError, match=r"delta_token: .* do not fit DeltaToken"):
            delta_token(layer, each)
    assert not covers(layer_of(2, 4, 24, 24), arrays_of(layer_of(2, 4, 24, 24)))


def test_a_cpu_keeps_mlx_operations(monkeypatch):
    monkeypatch.setattr("deltatune.machine.backend.device", lambda: "cpu")
    layer = layer_of(2, 4, 32, 24)
    assert not serves(layer, arrays_of(layer))
