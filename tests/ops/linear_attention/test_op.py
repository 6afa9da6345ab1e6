"""The operator linear_attention: messages, choice, and its values beside mlx-lm's state-space duality.

tests/ops/gated_delta and tests/ops/kernels run its implementations through their tables of cases.
"""

import mlx.core as mx
import numpy as np
import pytest

from deltatune import linear_attention
from deltatune.ops.gated_delta.trial_case import Call
from deltatune.ops.linear_attention.choice import MODELS, OPERATOR, SMALL
from deltatune.ops.operator import candidates
from deltatune.ops.operator.case import judged

SHAPES = {"q": (2, 70, 2, 16), "k": (2, 70, 2, 16), "v": (2, 70, 4, 6), "log_g": (2, 70, 4)}


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    monkeypatch.delenv("DELTATUNE_LINEAR_ATTENTION", raising=False)


def arguments(**changes) -> dict[str, mx.array]:
    keys = mx.random.split(mx.random.key(1), len(SHAPES))
    arrays = {name: mx.random.normal(shape, key=key) for (name, shape), key in zip(SHAPES.items(), keys, strict=True)}
    arrays["log_g"] = -mx.abs(arrays["log_g"])
    return arrays | changes


@pytest.mark.parametrize("name", ["q", "initial_state", "mask", "segments"])
def test_refuses_by_name(name):
    """The arguments are checked as gated_delta's are."""
    with pytest.raises(ValueError, match=rf"linear_attention: {name} must"):
        linear_attention(**arguments(**{name: mx.zeros((2, 7, 8))}))


@pytest.mark.parametrize("name", ["naive", "chunk"])
def test_forced_implementation_serves(name, monkeypatch):
    monkeypatch.setenv("DELTATUNE_LINEAR_ATTENTION", name)
    assert OPERATOR.order() == ((name,), "forced by DELTATUNE_LINEAR_ATTENTION")
    y, state = linear_attention(**arguments())
    monkeypatch.delenv("DELTATUNE_LINEAR_ATTENTION")
    others = linear_attention(**arguments())
    assert mx.allclose(y, others[0], rtol=0, atol=1e-4)
    assert mx.allclose(state, others[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_mlx_lm(masked):
    """Compares values and gradients with mlx-lm's ssm_attn, which computes the duality by another formula."""
    from mlx_lm.models.ssm import compute_dt, ssm_attn

    draw = np.random.default_rng(0)
    tokens, groups, of_state = (2, 70, 4, 6), (2, 70, 2, 16), (2, 4, 6, 16)
    shapes = [tokens, groups, groups, (2, 70, 4), (4,), (4,), (4,), of_state]
    arrays = [mx.array(draw.normal(size=shape).astype(np.float32)) for shape in shapes]
    limits = (0.0, float("inf"))
    mask = mx.arange(70)[None] >= mx.array([[0], [9]]) if masked else None

    def theirs(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        x, b, c, dt, a_log, d, bias, state = arrays
        y, last = ssm_attn(x, a_log, b, c, d, dt, bias, state, limits, mask=mask)
        seen = True if mask is None else mask[..., None, None]
        return mx.where(seen, y, 0), last

    def ours(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        x, b, c, dt, a_log, d, bias, state = arrays
        steps = compute_dt(dt, bias, limits)
        log_g = -mx.exp(a_log) * steps
        y, last = linear_attention(c, b, steps[..., None] * x, log_g, initial_state=state, mask=mask)
        seen = True if mask is None else mask[..., None, None]
        return y + mx.where(seen, x * d[:, None], 0), last

    cotangents = [mx.array(draw.normal(size=shape).astype(np.float32)) for shape in (tokens, of_state)]
    expected, results = (mx.vjp(function, arrays, cotangents) for function in (theirs, ours))
    for one, other in zip([*expected[0], *expected[1]], [*results[0], *results[1]], strict=True):
        assert mx.abs(one - other).max() <= 1e-5 * mx.abs(one).max()


def test_trial():
    """The naive form passes the trial that chunk is the truth of, and a form with wrong gates fails it."""
    shape = SMALL[1]
    naive = OPERATOR.candidates["naive"](Call.of_class(shape)).function
    assert judged(OPERATOR.case_of(shape), naive, "naive").passed

    def wrong(q, k, v, log_g, **options):
        return naive(q, k, v, 0.99 * log_g, **options)

    assert not judged(OPERATOR.case_of(shape), wrong, "wrong").passed


def test_chunk_passes_its_comparison_with_the_recurrence():
    assert [verdict.passed for verdict in OPERATOR.compare_last()] == [True] * len(SMALL)


@pytest.mark.parametrize("at", range(3))
def test_workloads_against_float64(at):
    workload = OPERATOR.workloads(True)[at]
    name, function = candidates.choose(OPERATOR, workload.call())
    verdict = judged(workload.case(name), function, name)
    assert verdict.passed, verdict


def test_models_have_their_sizes():
    """Heads of 64 with states of 128 and 256, groups, and 64 heads."""
    sizes = {(shape.key_heads, shape.value_heads, shape.key_size, shape.value_size) for shape in MODELS}
    assert {(8, 64, 128, 64), (1, 48, 128, 64), (1, 24, 256, 64)} <= sizes
