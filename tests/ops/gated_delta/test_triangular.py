"""Both inverses against float64, on matrices where repeated squaring fails."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.triangular import blocked_inverse, unit_lower_inverse


def one_key(size: int, beta: float) -> np.ndarray:
    """What a repeated key with open gates gives: beta everywhere below the diagonal."""
    return np.tril(np.full((size, size), beta), -1)


def random_keys(size: int, beta: float) -> np.ndarray:
    keys = np.random.default_rng(size).normal(size=(size, 24))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(beta * keys @ keys.T, -1)


@pytest.mark.parametrize("inverse", [unit_lower_inverse, blocked_inverse])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("matrix", [one_key, random_keys])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
def test_inverse(inverse, size, matrix, beta):
    strict = np.stack([matrix(size, beta), matrix(size, beta) * 0.5, np.zeros((size, size))])[None]
    found = np.array(inverse(mx.array(strict.astype(np.float32))), dtype=np.float64)
    exact = np.linalg.inv(np.eye(size) + strict.astype(np.float32).astype(np.float64))
    assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max()
    assert np.array_equal(np.triu(found[0, 0], 1), np.zeros((size, size)))
