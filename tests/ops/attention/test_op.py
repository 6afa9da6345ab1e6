"""The entry point: its refusals and their messages, and which implementation it takes."""

import mlx.core as mx
import pytest

from deltatune.ops.attention import attention, attention_blocked, attention_naive, choice
from deltatune.ops.attention.trial_case import AttentionCall
from deltatune.ops.operator import candidates
from deltatune.ops.tracing import trace

SHAPES = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6)}


def arguments(**changes) -> dict:
    arrays = {name: mx.random.normal(shape, key=mx.random.key(1)) for name, shape in SHAPES.items()}
    return arrays | {"scale": 0.5} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": mx.zeros((2, 5, 8))}, r"q must have 4 dimensions \[B, H, T, D\], got shape \[2, 5, 8\]"),
        ({"q": mx.zeros((2, 3, 5, 8))}, "q must have a multiple of k's 2 heads, got 3"),
        ({"q": mx.zeros((2, 4, 0, 8))}, r"q must hold at least one element, got shape \[2, 4, 0, 8\]"),
        ({"q": mx.zeros((2, 4, 5, 8), mx.int32)}, "q must be float32, float16 or bfloat16, got mlx.core.int32"),
        ({"k": mx.zeros((2, 2, 5, 6))}, r"k must have shape \[2, 2, 5, 8\], got \[2, 2, 5, 6\]"),
        ({"k": mx.zeros((1, 2, 5, 8))}, r"k must have shape \[2, 2, 5, 8\], got \[1, 2, 5, 8\]"),
        ({"v": mx.zeros((2, 2, 4, 6))}, r"v must have shape \[2, 2, 5, 6\], got \[2, 2, 4, 6\]"),
        ({"window": 0}, "window must be 1 or more and needs causal=True, got 0"),
        ({"window": 3, "causal": False}, "needs causal=True, got causal=False"),
        ({"segments": mx.zeros((2, 5))}, "segments must be integers, got mlx.core.float32"),
        ({"segments": mx.zeros((1, 5), mx.int32)}, r"segments must have shape \[2, 5\], got \[1, 5\]"),
        (
            {"segments": mx.zeros((2, 5), mx.int32), "q": mx.zeros((2, 4, 6, 8))},
            "segments need no more queries than keys, got 6 and 5",
        ),
        ({"sinks": mx.zeros((2,))}, r"sinks must have shape \[4\], got \[2\]"),
        ({"mask": mx.zeros((5, 5), mx.int32)}, "mask must be bool, float32, float16 or bfloat16, got mlx.core.int32"),
        ({"mask": mx.zeros((4, 5))}, r"mask must broadcast to \[2, 4, 5, 5\], got shape \[4, 5\]"),
        ({"mask": mx.zeros((1, 2, 4, 5, 5))}, r"mask must broadcast to \[2, 4, 5, 5\]"),
    ],
)
def test_refuses_by_name(changes, said):
    with pytest.raises(ValueError, match=f"attention: .*{said}"):
        attention(**arguments(**changes))


@pytest.mark.parametrize("shape", [(5, 5), (5,), (1, 1), (4, 1, 5), (2, 1, 5, 5), (2, 4, 5, 1)])
def test_masks_that_broadcast(shape):
    mask = mx.random.bernoulli(0.6, shape, key=mx.random.key(3))
    expected = attention_naive(**arguments(mask=mx.broadcast_to(mask, (2, 4, 5, 5))))
    assert mx.allclose(attention(**arguments(mask=mask)), expected, atol=1e-6)


@pytest.mark.parametrize("forced", ["naive", "blocked", "native"])
def test_forced(forced, monkeypatch):
    monkeypatch.setenv("DELTATUNE_ATTENTION", forced)
    name, _ = candidates.choose(choice.OPERATOR, call())
    assert name == forced
    segments = mx.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]], mx.int32)
    for more in ({}, {"segments": segments}, {"window": 2}, {"causal": False}, {"sinks": mx.zeros((4,))}):
        expected = attention_naive(**arguments(**more))
        assert mx.allclose(attention(**arguments(**more)), expected, atol=1e-5)


def call(**changes) -> AttentionCall:
    given = {"causal": True, "segments": None, "window": None, "sinks": None, "mask": None} | arguments(**changes)
    return AttentionCall(**given)


def test_calls_that_the_fused_kernels_do_not_support():
    for changes in ({"mask": mx.ones((1, 1, 5, 5), mx.bool_)}, {"v": mx.zeros(SHAPES["v"], mx.bfloat16)}):
        assert isinstance(choice.OPERATOR.candidates["fused"](call(**changes)), str)


@pytest.mark.parametrize("together", [1, 2])
def test_parts_that_a_plan_leaves_out_have_their_shapes(together):
    """A part computes one or two of the four heads of each of four rows."""
    q, k, v = (mx.zeros((4, 4, 64, 16)) for _ in range(3))
    arrays = [q, k, v, mx.zeros(4)]

    def attend(q, k, v, sinks):
        return [attention_blocked(q, k, v, scale=1.0, sinks=sinks, scores=together * 64 * 64)]

    with trace.having(shortened=True):
        outputs, gradients = mx.vjp(attend, arrays, [q])
    mx.eval(outputs, gradients)
    assert [array.shape for array in (*outputs, *gradients)] == [q.shape, *(array.shape for array in arrays)]
