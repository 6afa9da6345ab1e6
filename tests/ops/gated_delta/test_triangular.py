"""Both inverses against float64, on matrices where repeated squaring fails."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.triangular import BLOCK, blocked_inverse, unit_lower_inverse

ROUNDING = 2.0**-24


def one_key(size: int, beta: float) -> np.ndarray:
    """The matrix of a repeated key with open gates: beta everywhere below the diagonal."""
    return np.tril(np.full((size, size), beta), -1)


def random_keys(size: int, beta: float) -> np.ndarray:
    keys = np.random.default_rng(size).normal(size=(size, 24))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(beta * keys @ keys.T, -1)


def squared_inverse(strict: mx.array) -> mx.array:
    """The wrong way: (I - A)(I + A^2)(I + A^4)..., where powers explode."""
    identity = mx.eye(strict.shape[-1])
    inverse, power = identity - strict, strict
    for _ in range(5):
        power = power @ power
        inverse = inverse @ (identity + power)
    return inverse


def coarse_inverse(strict: mx.array) -> mx.array:
    """The right way with 10 bits of mantissa in the factors, as TF32 would have them."""
    bits = strict.view(mx.uint32) & 0xFFFFE000
    return blocked_inverse(bits.view(mx.float32))


def rounding_bound(strict: np.ndarray) -> np.ndarray:
    """How far each element of the inverse X of I + A may be off when a sum of n products is off by n roundings.

    Substitution leaves a residual of n |A| |X| roundings, and so is off by |X| times that (Higham, Accuracy and
    Stability of Numerical Algorithms, 8.2). First order in the rounding, which float64 gives for the very case.
    """
    size = len(strict)
    inverse = np.tril(np.linalg.inv(np.eye(size) + strict))
    substituted = size * np.abs(inverse) @ np.abs(strict) @ np.abs(inverse)
    return ROUNDING * (np.maximum(substituted, _merged(strict, inverse)) + np.abs(inverse))


def _merged(strict: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """The same for M^-1 B L^-1 from two inverses: their own errors pass through, and both products round."""
    size, half = len(strict), len(strict) // 2
    if size <= BLOCK:
        return size * np.abs(inverse) @ np.abs(strict) @ np.abs(inverse)
    upper, lower, below = inverse[:half, :half], inverse[half:, half:], strict[half:, :half]
    off = np.zeros_like(inverse)
    off[:half, :half] = upper_off = _merged(strict[:half, :half], upper)
    off[half:, half:] = lower_off = _merged(strict[half:, half:], lower)
    rounded = half * np.abs(lower) @ (np.abs(below) @ np.abs(upper) + np.abs(below @ upper))
    off[half:, :half] = lower_off @ np.abs(below @ upper) + np.abs(lower @ below) @ upper_off + rounded
    return off


def within_bound(inverse, matrix: np.ndarray) -> bool:
    """Whether the inverse of I + matrix, of a smaller one and of I are right, all in one call."""
    strict = np.stack([matrix, matrix * 0.5, np.zeros_like(matrix)]).astype(np.float32)
    found = np.array(inverse(mx.array(strict)[None])[0], dtype=np.float64)
    exact = np.tril(np.linalg.inv(np.eye(len(matrix)) + strict.astype(np.float64)))
    allowed = np.stack([rounding_bound(each) for each in strict.astype(np.float64)])
    return bool((np.abs(found - exact) <= allowed).all())


@pytest.mark.parametrize("inverse", [unit_lower_inverse, blocked_inverse])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("matrix", [one_key, random_keys])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
def test_inverse(inverse, size, matrix, beta):
    assert within_bound(inverse, matrix(size, beta))


@pytest.mark.parametrize("inverse", [unit_lower_inverse, blocked_inverse])
def test_nothing_stands_above_the_diagonal(inverse):
    found = np.array(inverse(mx.array(one_key(64, 1.9).astype(np.float32))))
    assert np.array_equal(np.triu(found, 1), np.zeros((64, 64)))
    assert np.array_equal(np.diag(found), np.ones(64))


@pytest.mark.parametrize(
    ("inverse", "matrix"), [(squared_inverse, one_key), (coarse_inverse, one_key), (coarse_inverse, random_keys)]
)
def test_a_worse_inverse_is_beyond_the_bound(inverse, matrix):
    assert not within_bound(inverse, matrix(64, 1.9))
