"""The attention of one token to rows of different lengths, against its definition in float64, and its refusals."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.decoding.attention_token import BOUNDS, KERNEL, attention_token, covers, serves, trial_case
from deltatune.ops.kernels.launch import on
from deltatune.ops.operator.case import judged

# Heads, key heads and sizes: heads in blocks of one, two, three of four, and four.
CASES = [(4, 4, 32), (4, 2, 64), (6, 1, 128), (8, 2, 256)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).split(".")[-1])
def test_a_token_attends_to_its_row_alone(case, dtype, running):
    """Behind a row's last key lies NaN."""
    verdict = judged(trial_case(*case, dtype), running(KERNEL), "kernel")
    assert verdict.passed, (verdict.errors, verdict.problem)


def drawn(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_large_scores_are_those_of_float64(scale, running):
    q, keys, values = drawn(2, 4, 1, 32), drawn(2, 2, 90, 32, seed=1), drawn(2, 2, 90, 32, seed=2)
    lengths = [90, 33]
    with on(running(KERNEL)):
        y = attention_token(q, keys, values, mx.array(lengths, mx.int32), scale)
    for row, length in enumerate(lengths):
        wide = [np.array(x[row], np.float64) for x in (q, keys, values)]
        k, v = (np.repeat(x[:, :length], 2, axis=0) for x in wide[1:])
        scores = scale * (wide[0] @ k.swapaxes(1, 2))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = weights / weights.sum(axis=-1, keepdims=True) @ v
        # A score of up to s is off by s 2^-24 for each of 32 products, and its exponential by as much of itself.
        bound = 32 * 2.0**-24 * max(1.0, np.abs(scores).max())
        assert np.abs(np.array(y[row], np.float64) - expected).max() < bound * np.abs(v).max()


def test_other_shapes_are_refused():
    q, keys, lengths = drawn(2, 4, 1, 32), drawn(2, 2, 9, 32), mx.array([1, 9], mx.int32)
    assert covers(q, keys, keys, lengths)
    refused = [
        (drawn(2, 4, 2, 32), keys, keys, lengths),
        (q, drawn(2, 3, 9, 32), drawn(2, 3, 9, 32), lengths),
        (q, keys, keys[:, :, :8], lengths),
        (q, keys, keys.astype(mx.float16), lengths),
        (q, keys, keys, lengths[:1]),
        (drawn(2, 4, 1, 24), drawn(2, 2, 9, 24), drawn(2, 2, 9, 24), lengths),
    ]
    for arrays in refused:
        assert not covers(*arrays)
        with pytest.raises(ValueError, match=r"attention_token: q .* do not fit"):
            attention_token(*arrays, 1.0)


def test_a_cpu_keeps_mlx_attention(monkeypatch):
    monkeypatch.setattr("deltatune.machine.backend.device", lambda: "cpu")
    assert not serves(drawn(2, 4, 1, 32), drawn(2, 2, 9, 32), drawn(2, 2, 9, 32), mx.array([1, 9], mx.int32))
