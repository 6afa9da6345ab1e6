"""Activations of upstream's models on a CPU: what is served, and with which results."""

import sys
from collections import Counter
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import activations, olmo_hybrid

from deltatune import patches
from deltatune.machine import backend
from deltatune.ops.attention.blocked import attention_blocked
from deltatune.ops.pointwise import exponentials
from deltatune.patches import patched
from deltatune.patches.small_cases import SmallConfig

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="these patches are for CPUs")


@pytest.fixture
def served(monkeypatch):
    """Counts the calls of each function of exponentials, which serve arrays of any size."""
    calls = Counter()
    for name in ("silu", "swiglu", "gelu_tanh", "softmax"):

        def count(*arrays, name=name, function=None):
            calls[name] += 1
            return function(*arrays)

        monkeypatch.setattr(exponentials, name, partial(count, function=getattr(exponentials, name)))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(exponentials, "_FEWEST", 1)
    return calls


def results(model, tokens):
    """The logits, and the gradient of every parameter, in training."""

    def loss(parameters):
        model.update(parameters)
        logits = model(tokens)
        return nn.losses.cross_entropy(logits[:, :-1], tokens[:, 1:]).mean(), logits

    (_, logits), gradients = mx.value_and_grad(loss)(model.train().trainable_parameters())
    return {"logits": logits, **dict(tree_flatten(gradients))}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_a_models_activations_are_served_with_upstreams_results(tiny_model, served, monkeypatch, family):
    model, tokens = tiny_model(family), mx.random.randint(0, 60, (2, 24), key=mx.random.key(1))
    with patched(model):
        found = results(model, tokens)
    assert set(served) == {"silu", "swiglu"}
    monkeypatch.setattr(sys, "platform", "darwin")
    served.clear()
    with patched(model):
        wanted = results(model, tokens)
    assert served["silu"] == 0
    for name, array in wanted.items():
        # Some thousand roundings of 6e-8 on the way to a gradient.
        assert mx.abs(found[name] - array).max() <= 1e-4 * mx.abs(array).max(), name


def test_attention_has_its_softmax(served, monkeypatch):
    shapes = ((1, 4, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    arrays = [mx.random.normal(shape, key=mx.random.key(at)) for at, shape in enumerate(shapes)]

    def results():
        attended = lambda *x: [attention_blocked(*x, scale=0.3, scores=400)]  # noqa: E731
        (y,), gradients = mx.vjp(attended, arrays, arrays[:1])
        return [y, *gradients]

    found = results()
    assert served["softmax"] >= 4
    served.clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    for ours, wanted in zip(found, results(), strict=True):
        assert mx.allclose(ours, wanted, rtol=1e-5, atol=1e-5).item()
    assert not served


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_an_mlp_calls_each_projection_once(served, dtype):
    """An adapter would draw its dropout at each call."""
    mlp, calls = olmo_hybrid.MLP(SmallConfig()), []
    mlp.set_dtype(dtype)

    class Counted(nn.Linear):
        def __call__(self, x):
            calls.append(self)
            return super().__call__(x)

    for projection in mlp.children().values():
        projection.__class__ = Counted
    with patched():
        calls.clear()
        mx.eval(mlp(mx.ones((1, 5, 16), dtype)))
    assert len(calls) == 3
    assert served["swiglu"] == (dtype == mx.float32)


@pytest.mark.parametrize(("width", "tokens", "by_operations"), [(128, 1, 0), (128, 16, 1), (256, 1, 1)])
def test_a_decoders_swiglu_is_mlxs_until_it_is_large(served, width, tokens, by_operations):
    gate, x = (mx.random.normal((64, tokens, width), key=mx.random.key(seed)) for seed in (0, 1))
    expected = activations.swiglu(gate, x)
    with patched():
        served.clear()
        assert mx.allclose(activations.swiglu(gate, x), expected, atol=1e-5).item()
    assert served["swiglu"] == by_operations


def test_a_gelu_is_served_by_its_kind(served):
    x = mx.random.normal((3, 5))
    expected = {kind: nn.GELU(kind)(x) for kind in ("none", "precise", "tanh", "fast")}
    with patched():
        for kind, wanted in expected.items():
            assert mx.allclose(nn.GELU(kind)(x), wanted, atol=1e-6).item(), kind
    assert served == {"gelu_tanh": 2}


def test_functions_that_are_compiled_for_any_shape_keep_upstreams(served):
    """A custom gradient cannot be part of them."""
    any_shape = mx.compile(lambda x: nn.silu(x) * 2, shapeless=True)
    with patched():
        for shape in ((3, 5), (7, 2)):
            assert any_shape(mx.ones(shape)).shape == shape


def test_every_record_is_of_a_target_of_its_own():
    assert len({record.target for record in patches.ON_CPU}) == len(patches.ON_CPU)
