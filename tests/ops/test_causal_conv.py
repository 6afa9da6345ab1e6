"""causal_conv against loops in float64, forward and backward."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.causal_conv import causal_conv
from deltatune.ops.operator.measure import as_float64

TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


def reference(x, weight, bias, state, segments, dy):
    """y and every gradient, by a loop over tokens and columns, and the same loop backwards."""
    (B, T, C), K = x.shape, weight.shape[1]
    history = K - 1
    inputs = np.concatenate([state, x], axis=1)
    segments = np.concatenate([np.repeat(segments[:, :1], history, 1), segments], axis=1)
    reads = [
        (b, t, t + j, j)
        for b in range(B)
        for t in range(T)
        for j in range(K)
        if segments[b, t + j] == segments[b, t + history]
    ]
    y = np.zeros((B, T, C)) + bias
    for b, t, s, j in reads:
        y[b, t] += weight[:, j] * inputs[b, s]
    d_inputs, d_weight = np.zeros_like(inputs), np.zeros_like(weight)
    for b, t, s, j in reversed(reads):
        d_inputs[b, s] += weight[:, j] * dy[b, t]
        d_weight[:, j] += inputs[b, s] * dy[b, t]
    dx, d_state = d_inputs[:, history:], d_inputs[:, :history]
    return y, {"x": dx, "weight": d_weight, "bias": dy.sum((0, 1)), "initial_state": d_state}


def draw(B, T, C, K, seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = {"x": (B, T, C), "weight": (C, K), "bias": (C,), "initial_state": (B, K - 1, C)}
    arrays = {name: mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype) for name, shape in shapes.items()}
    segments = np.cumsum(rng.random((B, T)) < 0.3, axis=1).astype(np.int32) + 5
    dy = mx.array(rng.normal(size=(B, T, C)).astype(np.float32)).astype(dtype)
    return arrays, segments, dy


def assert_close(got, expected, tolerance, name):
    assert got.shape == expected.shape, name
    if expected.size:
        assert np.abs(as_float64(got) - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-3), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("B", "T", "C", "K"), [(1, 1, 3, 4), (2, 2, 5, 4), (3, 13, 4, 4), (2, 9, 3, 1), (1, 30, 2, 2)])
def test_every_output_and_gradient_matches_the_loop(B, T, C, K, packed, dtype):
    arrays, segments, dy = draw(B, T, C, K, 7 * T + K, getattr(mx, dtype))
    segments = segments if packed else np.zeros_like(segments)

    def run(*primals):
        named = dict(zip(arrays, primals, strict=True))
        state = named.pop("initial_state")
        return causal_conv(**named, initial_state=state, segments=mx.array(segments) if packed else None)

    exact = [as_float64(arrays[name]) for name in ("x", "weight", "bias", "initial_state")]
    y, expected = reference(*exact, segments, as_float64(dy))
    # On CUDA a kernel that mx.compile fuses for an empty array, as the state is for K = 1, ends the process.
    crashes = backend.device() == "cuda" and K == 1
    for transform in (lambda f: f, mx.compile) if (B, dtype) == (2, "float32") and not crashes else (lambda f: f,):
        vjp = transform(lambda *primals: mx.vjp(run, list(primals), [dy]))
        outputs, grads = vjp(*arrays.values())
        assert_close(outputs[0], y, TOLERANCE[dtype], "y")
        for name, grad in zip(arrays, grads, strict=True):
            assert grad.dtype == arrays[name].dtype
            assert_close(grad, expected[name], TOLERANCE[dtype], name)


def test_the_gradient_of_a_long_row_is_accurate():
    mx.random.seed(2)
    x, weight, dy = mx.random.normal((2, 4100, 16)), mx.random.normal((16, 4)), mx.random.normal((2, 4100, 16))
    _, (_, got) = mx.vjp(causal_conv, [x, weight], [dy])
    padded = np.pad(as_float64(x), [(0, 0), (3, 0), (0, 0)])
    expected = np.stack([(padded[:, tap : tap + 4100] * as_float64(dy)).sum((0, 1)) for tap in range(4)], axis=1)
    assert_close(got, expected, TOLERANCE["float32"], "weight")


def test_pieces_continue_through_the_state_bit_for_bit():
    arrays, _, _ = draw(2, 23, 5, 4, 1, mx.float32)
    x, weight = arrays["x"], arrays["weight"]
    inputs = mx.concatenate([mx.zeros((2, 3, 5)), x], axis=1)
    ends = (0, 1, 3, 4, 11, 23)
    pieces = [
        causal_conv(x[:, start:stop], weight, initial_state=inputs[:, start : start + 3])
        for start, stop in itertools.pairwise(ends)
    ]
    assert mx.array_equal(mx.concatenate(pieces, axis=1), causal_conv(x, weight))


def test_a_packed_document_is_the_document_alone_and_nan_before_it_does_not_reach_it():
    mx.random.seed(0)
    x, weight = mx.random.normal((1, 12, 4)), mx.random.normal((4, 4))
    segments = mx.array([[0] * 5 + [1] * 7])
    alone = causal_conv(x[:, 5:], weight)
    poisoned = mx.concatenate([mx.full((1, 5, 4), float("nan")), x[:, 5:]], axis=1)

    def packed(x):
        return causal_conv(x, weight, initial_state=mx.full((1, 3, 4), float("nan")), segments=segments)[:, 5:]

    (y,), (dx,) = mx.vjp(packed, [poisoned], [mx.ones((1, 7, 4))])
    # On CUDA, sums of rows of another length are added in another order.
    assert mx.allclose(y, alone, rtol=0, atol=0 if backend.device() == "cpu" else 1e-6)
    assert mx.array_equal(dx[:, :5], mx.zeros((1, 5, 4)))


def test_works_under_checkpoint_vmap_and_a_second_derivative():
    mx.random.seed(1)
    x, weight = mx.random.normal((3, 2, 9, 4)), mx.random.normal((4, 3))
    segments = mx.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)

    def loss(x, weight):
        return mx.sin(causal_conv(x, weight, segments=segments)).sum()

    plain = mx.grad(loss, argnums=(0, 1))
    for a, b in zip(plain(x[0], weight), mx.grad(mx.checkpoint(loss), argnums=(0, 1))(x[0], weight), strict=True):
        assert mx.array_equal(a, b)
    for a, b in zip(plain(x[0], weight), mx.grad(mx.compile(loss), argnums=(0, 1))(x[0], weight), strict=True):
        assert mx.allclose(a, b, rtol=1e-5, atol=1e-6)
    batched = mx.vmap(lambda x: causal_conv(x, weight, segments=segments))(x)
    assert mx.allclose(batched, mx.stack([causal_conv(one, weight, segments=segments) for one in x]))

    def curvature(x, weight):
        return (mx.grad(loss)(x, weight) ** 2).sum()

    step = 1e-2
    direction = mx.random.normal(weight.shape)
    exact = (mx.grad(curvature, argnums=1)(x[0], weight) * direction).sum().item()
    measured = (curvature(x[0], weight + step * direction) - curvature(x[0], weight - step * direction)) / (2 * step)
    assert measured.item() == pytest.approx(exact, rel=5e-3)
