"""Activations and softmax from additions and multiplications, against float64."""

import math
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.pointwise import exponentials
from deltatune.ops.recomputation import small_cases

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="these are for CPUs")
# The polynomial is 1.1e-7 off, and its last operations round by 6e-8 each.
EXACT = 3e-7


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")


def numbers(low: float, high: float) -> mx.array:
    """Evenly spread numbers, drawn ones, tiny ones, and zeros of both signs."""
    drawn = np.random.default_rng(0).normal(size=100_000)
    every = np.concatenate([np.linspace(low, high, 400_001), 3 * drawn, 1e-6 * drawn, [0.0, -0.0]])
    return mx.array(every.clip(low, high).astype(np.float32))


def float64(x: mx.array) -> np.ndarray:
    return np.array(x).astype(np.float64)


def test_exponentials():
    x = numbers(-87.3, 87)
    truth = np.exp(float64(x))
    assert np.abs(float64(exponentials.exponential(x)) / truth - 1).max() < EXACT
    # The hidden scores of attention must get exactly nothing.
    hidden = mx.array([-88.0, -100.0, -1e30, -math.inf])
    assert exponentials.exponential(hidden).tolist() == [0, 0, 0, 0]
    assert exponentials.exponential(mx.zeros(1)).item() == 1
    assert math.isnan(exponentials.exponential(mx.array(math.nan)).item())


def test_sigmoids():
    x = numbers(-86, 86)
    truth = 1 / (1 + np.exp(-float64(x)))
    assert np.abs(float64(exponentials.sigmoid(x)) / truth - 1).max() < EXACT
    low, high, unknown = exponentials.sigmoid(mx.array([-math.inf, math.inf, math.nan])).tolist()
    assert low < 1e-37
    assert high == 1
    assert math.isnan(unknown)


def sigmoid64(x):
    return 1 / (1 + np.exp(-x))


def gelu64(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("ours", "truth", "count"),
    [
        (exponentials.silu, lambda x: x * sigmoid64(x), 1),
        (exponentials.swiglu, lambda gate, x: gate * sigmoid64(gate) * x, 2),
        (exponentials.gelu_tanh, gelu64, 1),
    ],
    ids=["silu", "swiglu", "gelu_tanh"],
)
def test_activations_and_their_gradients(ours, truth, count):
    arrays = [mx.random.normal((64, 200), key=mx.random.key(at)) * 4 for at in range(count)]
    d = mx.random.normal((64, 200), key=mx.random.key(9))
    (y,), gradients = mx.vjp(lambda *x: [ours(*x)], arrays, [d])
    wide, step = [float64(x) for x in arrays], 1e-5
    # Five operations in fp32, on numbers of up to the largest of these.
    assert np.abs(float64(y) - truth(*wide)).max() < 5 * EXACT * np.abs(truth(*wide)).max()
    for at, gradient in enumerate(gradients):
        moved = [[x + sign * step * (n == at) for n, x in enumerate(wide)] for sign in (1, -1)]
        slope = (truth(*moved[0]) - truth(*moved[1])) / (2 * step) * float64(d)
        assert np.abs(float64(gradient) - slope).max() < 5 * EXACT * np.abs(slope).max()


def test_softmax():
    scores = mx.random.normal((3, 7, 100), key=mx.random.key(0)) * 20
    scores[:, :, 60:] = -1e30
    scores[2, 3] = -1e30
    found, wide = exponentials.softmax(scores), float64(scores)
    e = np.exp(wide - wide.max(axis=-1, keepdims=True))
    # 100 numbers are added up, each addition rounds by 6e-8.
    assert np.abs(float64(found) - e / e.sum(axis=-1, keepdims=True)).max() < 100 * EXACT
    assert found[0, 0, 60:].max().item() == 0
    assert mx.allclose(found[2, 3], mx.array(0.01)).item()


def test_who_is_served(monkeypatch):
    large, small = mx.zeros((256, 256)), mx.zeros((8, 8))
    assert exponentials.serves(large)
    assert not exponentials.serves(small)
    assert not exponentials.serves(large, large.astype(mx.bfloat16))
    with small_cases() as served:
        assert exponentials.serves(small)
    assert served == ["exponentials"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not exponentials.serves(large)
    assert mx.array_equal(exponentials.sigmoid(large), mx.sigmoid(large))


def test_other_dtypes_have_upstreams_values():
    x = mx.random.normal((4, 5)).astype(mx.bfloat16)
    assert exponentials.silu(x).dtype == mx.bfloat16
    assert mx.allclose(exponentials.silu(x), nn.silu(x), atol=1e-2).item()
