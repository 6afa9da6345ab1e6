"""Parts of the gated delta rule's chunks: their cutting, decayed products by channel, and inverses, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.channel import decay_levels, gram, gram_backward
from deltatune.ops.gated_delta.chunk import Chunking, choose_chunking, empty_chunks, group_of, sequence_of, write_group
from deltatune.ops.gated_delta.triangular import BLOCK, blocked_inverse, unit_lower_inverse


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("trailing", [(), (6,)])
def test_groups_cover_the_sequence_once_and_come_back(length, trailing):
    chunking = Chunking(length, 16, 3)
    x = mx.random.normal((2, length, 4, *trailing))
    chunks = empty_chunks(x, chunking, 2) * mx.nan
    for span in chunking.groups():
        group = group_of(x, span, chunking.size, key_heads=2)
        assert group.shape[:5] == (span.chunks, 2, 2, 2, 16)
        write_group(chunks, group, span, chunking)
    assert mx.array_equal(sequence_of(chunks, chunking), x)


def test_value_head_reads_its_key_head():
    heads = mx.broadcast_to(mx.arange(6, dtype=mx.float32)[None, None, :, None], (1, 16, 6, 1))
    group = group_of(heads, Chunking(16, 16, 1).groups()[0], 16, key_heads=2)
    assert [[group[0, 0, key, value, 0, 0].item() for value in range(3)] for key in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_short_sequences_take_short_chunks():
    assert choose_chunking(1, 4, 128).size == 16
    assert choose_chunking(33, 4, 128).size == 64
    assert choose_chunking(500, 4, 64).size == 32
    assert choose_chunking(500, 4, 128).size == 64
    assert choose_chunking(500, 10_000, 128).group == 1
    assert choose_chunking(500, 4, 128).group < choose_chunking(500, 4, 64).group


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
