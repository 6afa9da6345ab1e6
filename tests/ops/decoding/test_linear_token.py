"""The kernel of one token of each row in a linear layer against its definition, and its refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest

from deltatune.ops.decoding.linear_token import (
    BOUNDS,
    KERNEL,
    LinearToken,
    LowRank,
    RowNorm,
    TokenBlock,
    covers,
    linear_token,
    linear_token_naive,
    serves,
    trial_case,
)
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import judged

# Each combination in one type, and any three parts in both.
PARTS = [(parts, list(BOUNDS)[sum(parts) % 2]) for parts in itertools.product([False, True], repeat=4)]


@pytest.mark.parametrize(("parts", "dtype"), PARTS, ids=str)
def test_a_token_is_that_of_the_definition(parts, dtype, running):
    """With and without a norm, a second weight, adapters and a residual."""
    verdict = judged(trial_case(parts, dtype, TokenBlock(2, 2)), running(KERNEL), "kernel")
    assert verdict.passed, (verdict.errors, verdict.problem)


def drawn(*shapes: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(5), len(shapes))
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_row_of_any_start_is_read(rows, running):
    """One row may start in the middle of another array's, at no multiple of 16 bytes."""
    wide, weight = drawn((rows, 107), (20, 104))
    call = LinearToken(wide[:, None, 3:], weight)
    with on(running(KERNEL)):
        y = linear_token(call)
    exact = linear_token_naive(LinearToken(call.x.astype(mx.float32), weight.astype(mx.float32)))
    assert mx.abs(y - exact).max().item() <= BOUNDS[mx.bfloat16] * mx.abs(exact).max().item()


def test_a_wrong_kernel_is_refused(running):
    def wrong(launch: Launch) -> list[mx.array]:
        (y,) = running(KERNEL)(launch)
        return [y * 1.1]

    assert not judged(trial_case((True,) * 4, mx.bfloat16, TokenBlock(2, 1)), wrong, "kernel").passed


def test_other_shapes_are_refused():
    x, weight, second, norm, residual = drawn((3, 16), (8, 16), (8, 16), (16,), (3, 8))
    h, b, second_b = drawn((3, 2), (2, 8), (2, 8))
    call = LinearToken(x, weight, RowNorm(norm, 1e-6), second, LowRank(h, b, second_b), residual)
    assert covers(call)
    refused = [
        replace(call, x=x[:, :12], weight=weight[:, :12], norm=None, second=None, low_rank=None),
        replace(call, weight=weight.astype(mx.float32)),
        replace(call, second=second[:4]),
        replace(call, norm=RowNorm(norm[:8], 1e-6)),
        replace(call, residual=residual[:1]),
        replace(call, low_rank=LowRank(h, b[:1], second_b)),
        replace(call, low_rank=LowRank(h, b)),
        LinearToken(x.astype(mx.float32), weight.astype(mx.float32)),
        LinearToken(x[0], weight),
    ]
    for each in refused:
        assert not covers(each)
        with pytest.raises(ValueError, match=r"linear_token: .* do not fit"):
            linear_token(each)


def test_a_cpu_keeps_mlx_operations(monkeypatch):
    monkeypatch.setattr("deltatune.machine.backend.device", lambda: "cpu")
    x, weight = drawn((3, 16), (8, 16))
    assert not serves(LinearToken(x, weight))
