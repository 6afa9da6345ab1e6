"""The entry point: its refusals and their messages, and which implementation it takes."""

import json
import warnings

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.ops.attention import attention, attention_blocked, attention_naive, choice, fused_op
from deltatune.ops.attention.trial_case import AttentionCall
from deltatune.ops.operator import candidates, verdicts
from deltatune.ops.operator.candidates import ImplementationWarning
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


class ScaledBlocked:
    """Counts its calls, and returns a factor times the result of `blocked`, in place of the fused kernels."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, q, k, v, *, machine=None, execute=None, **options):
        self.calls += 1
        return attention_blocked(q, k, v, **options) * self.factor


@pytest.fixture
def pretended_gpu(monkeypatch, tmp_path):
    """Return use(function), which puts a function in place of a GPU's fused kernels. No verdict is known."""
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "device", lambda: "metal")
    monkeypatch.setattr(backend, "_UNMEASURED", ())
    monkeypatch.setattr(candidates, "_announced", set())
    verdicts.forget()
    yield lambda function: monkeypatch.setattr(fused_op, "attention_fused", function)
    verdicts.forget()


def test_kernels_that_pass_their_trial_serve_and_the_verdict_is_kept(pretended_gpu, tmp_path):
    kernels = ScaledBlocked()
    pretended_gpu(kernels)
    assert candidates.choose(choice.OPERATOR, call())[0] == "fused"
    assert kernels.calls == 1
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["verdict"]["errors"].keys() == {"y", "dq", "dk", "dv"}
    verdicts.forget()
    assert candidates.choose(choice.OPERATOR, call())[0] == "fused"
    assert kernels.calls == 1


def test_kernels_that_are_wrong_are_not_used_and_the_user_is_told(pretended_gpu):
    pretended_gpu(ScaledBlocked(1.001))
    with pytest.warns(ImplementationWarning, match=r"attention: fused \(metal, float32, .*by 1\.0e-03"):
        name, function = candidates.choose(choice.OPERATOR, call())
    assert (name, function) == ("blocked", attention_blocked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert candidates.choose(choice.OPERATOR, call())[0] == "blocked"


def test_a_forced_kernel_that_is_wrong_is_an_error(pretended_gpu, monkeypatch):
    monkeypatch.setenv("DELTATUNE_ATTENTION", "fused")
    pretended_gpu(ScaledBlocked(float("nan")))
    with pytest.raises(UserError, match=r"DELTATUNE_ATTENTION=fused: .*differs from float64.*Unset it"):
        candidates.choose(choice.OPERATOR, call())
    with pytest.raises(UserError, match="cannot serve this call: it has a mask"):
        candidates.choose(choice.OPERATOR, call(mask=mx.ones((1, 1, 5, 5), mx.bool_)))


def test_a_call_that_kernels_do_not_support_goes_to_blocked(pretended_gpu):
    pretended_gpu(ScaledBlocked())
    wide = {name: mx.zeros((1, 1, 4, 264)) for name in SHAPES}
    assert candidates.choose(choice.OPERATOR, call(**wide))[0] == "blocked"
    mixed = {"v": mx.zeros(SHAPES["v"], mx.bfloat16)}
    assert candidates.choose(choice.OPERATOR, call(**mixed))[0] == "blocked"


def test_the_trial_runs_while_something_else_is_traced(pretended_gpu):
    kernels = ScaledBlocked()
    pretended_gpu(kernels)
    arrays = {name: x for name, x in arguments().items() if name in SHAPES}

    def loss(q: mx.array) -> mx.array:
        return attention(**(arrays | {"q": q}), scale=0.5).sum()

    expected = mx.grad(lambda q: attention_naive(q, arrays["k"], arrays["v"], scale=0.5).sum())(arrays["q"])
    for traced in (mx.compile(mx.grad(loss)), mx.grad(mx.checkpoint(loss)), mx.compile(mx.grad(mx.checkpoint(loss)))):
        verdicts.forget()
        assert mx.allclose(traced(arrays["q"]), expected, atol=1e-5)


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
