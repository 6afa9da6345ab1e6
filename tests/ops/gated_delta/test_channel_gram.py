"""The decayed products that are computed by halving, against their definition pair by pair in float64."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.channel_gram import decay_levels, gram, gram_backward


@pytest.fixture
def arrays():
    draw = np.random.default_rng(0)
    log_g = -np.exp(draw.normal(size=(2, 3, 16, 5)) * 2)
    log_g[0, 0, 3] = -np.inf
    log_g[1, 2, 4:7] = np.log(1e-12)
    return {
        "qk": draw.normal(size=(2, 1, 2, 16, 5)).astype(np.float32),
        "log_g": log_g.astype(np.float32),
        "dgram": draw.normal(size=(2, 3, 2, 16, 16)).astype(np.float32),
    }


def direct(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return gram, dq, dk and dlog_g by definition: the decay of each pair of tokens is a product over its own span."""
    qk, log_g, dgram = (arrays[name].astype(np.float64) for name in ("qk", "log_g", "dgram"))
    gate = np.exp(log_g)
    products, dqk, dlog = np.zeros(dgram.shape), np.zeros((2, 3, 2, 16, 5)), np.zeros(log_g.shape)
    for i in range(16):
        for j in range(i + 1):
            decay = gate[:, :, j + 1 : i + 1].prod(axis=2)
            for which in (0, 1) if i > j else (0,):
                row, column = qk[:, :, which, i], qk[:, :, 1, j]
                term = row * column * decay
                products[:, :, which, i, j] = term.sum(axis=-1)
                seed = dgram[:, :, which, i, j, None]
                dqk[:, :, which, i] += seed * column * decay
                dqk[:, :, 1, j] += seed * row * decay
                dlog[:, :, j + 1 : i + 1] += (seed * term)[:, :, None]
    return products, dqk[:, :, 0], dqk[:, :, 1], dlog


def test_decayed_products_and_their_gradients(arrays):
    qk, dgram = mx.array(arrays["qk"]), mx.array(arrays["dgram"])
    levels, from_start, to_end = decay_levels(mx.exp(mx.array(arrays["log_g"])))
    results = (gram(qk, levels), *gram_backward(qk, levels, dgram))
    for name, result, expected in zip(("gram", "dq", "dk", "dlog_g"), results, direct(arrays), strict=True):
        assert np.abs(np.array(result) - expected).max() <= 2e-6 * np.abs(expected).max(), name
    gate = np.exp(arrays["log_g"].astype(np.float64))
    assert np.allclose(np.array(from_start), gate.cumprod(axis=2), rtol=1e-5, atol=1e-30)
    after = np.stack([gate[:, :, t + 1 :].prod(axis=2) for t in range(16)], axis=2)
    assert np.allclose(np.array(to_end), after, rtol=1e-5, atol=1e-30)
