"""The kernel that samples a token of each row: MLX's tokens, float64's log-probabilities and entropies; bad rows."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.decoding.sampled_token import (
    DTYPES,
    SHARES,
    sampled_token,
    sampled_token_naive,
    serves,
    trial_case,
    twice,
)
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import judged


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_mlx_own_and_their_figures_those_of_float64(dtype, running):
    verdict = judged(trial_case(dtype), running(SHARES), "kernel")
    assert verdict.passed, (verdict.errors, verdict.problem)


@pytest.mark.parametrize("result", range(3))
def test_a_wrong_kernel_is_refused(result, running):
    def wrong(launch: Launch) -> list[mx.array]:
        results = running(SHARES)(launch)
        if len(results) == 3:
            results[result] = results[result] + (0.01 if result == 1 else 1)
        return results

    assert not judged(trial_case(mx.float32), wrong, "kernel").passed


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 31), (1, 700)], ids=str)
def test_rows_of_few_logits(shape, running):
    logits = mx.random.normal(shape, key=mx.random.key(1))
    for seed in range(5):
        with on(running(SHARES)):
            results = sampled_token(logits, twice(mx.random.key(seed)), 1.3)
        for one, other in zip(results, sampled_token_naive(logits, twice(mx.random.key(seed)), 1.3), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert mx.array_equal(results[2], twice(mx.random.split(mx.random.key(seed))[0]))


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_row_without_a_distribution_has_no_finite_figures(by_kernel, running):
    logits = mx.zeros((5, 600))
    logits[0, 599] = mx.nan
    logits[1, 7] = mx.inf
    logits[2] = -mx.inf
    # A large logit among -infinity is sampled for certain.
    logits[3] = -mx.inf
    logits[3, 431] = 1e4
    with on(running(SHARES)):
        tokens, figures, _ = (sampled_token if by_kernel else sampled_token_naive)(logits, twice(mx.random.key(0)), 1.0)
    assert mx.array_equal(figures[0], tokens)
    figures = figures[1:]
    assert mx.isfinite(figures).tolist() == [[False] * 3 + [True] * 2] * 2
    assert (tokens[3].item(), figures[0][3].item(), figures[1][3].item()) == (431, 0.0, 0.0)
    assert figures[1][4].item() == pytest.approx(np.log(600), rel=1e-5)


def test_a_cpu_keeps_mlx_operations(monkeypatch):
    monkeypatch.setattr("deltatune.machine.backend.device", lambda: "cpu")
    assert not serves(mx.zeros((2, 40)))
