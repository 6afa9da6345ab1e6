"""Attention trains through deltatune with upstream's numbers under every kind of mask, and infers with its bits."""

import gc
import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from deltatune.layers import gated_delta_layers
from deltatune.machine import backend
from deltatune.ops.checkpoint import checkpointed
from deltatune.ops.segments import attention_mask, rule_of
from deltatune.ops.tracing import trace
from deltatune.patches import patched, recurrence, served, whole_rows
from deltatune.patches.tables import attention as table
from deltatune.patches.tables import one_row_products
from families import weekly_but
from model_gradients import gradients, losses, next_token_loss, relative_errors, tokens

LATENT = ("kimi_linear", "bailing", "kimi_k3")
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "qwen3", "gemma3_text", *LATENT)
DAILY = [("gemma3_text", "mx.checkpoint"), ("kimi_linear", "checkpointed"), ("olmo_hybrid", "compiled")]
WEEKLY = [
    pytest.param(family, how, marks=pytest.mark.weekly)
    for family, how in itertools.product(*zip(*DAILY, strict=True))
    if (family, how) not in DAILY
]
OURS, UPSTREAM = whole_rows.OURS, whole_rows.UPSTREAM


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.fixture(autouse=True)
def blocked(monkeypatch):
    """Force `blocked`: MLX's own attention would serve rows of a few tokens (ops/attention/choice.py)."""
    monkeypatch.setenv("DELTATUNE_ATTENTION", "blocked")
    whole_rows.reset()


@pytest.fixture
def masks_read(monkeypatch):
    """The masks that deltatune's attention was given."""
    found = []

    def recorded(*arrays, mask=None, **options):
        found.append(mask)
        return attention(*arrays, mask=mask, **options)

    attention = whole_rows.attention
    monkeypatch.setattr(whole_rows, "attention", recorded)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_upstreams_and_no_mask_is_read(tiny_model, masks_read, family):
    model = tiny_model(family)
    rows = tokens(2, 41)
    with patched():  # Everything but attention is the same on both sides.
        with pytest.MonkeyPatch.context() as patch:
            for module in (whole_rows, table):
                patch.setattr(module, "serves_attention", lambda: False)
            expected_loss, expected = gradients(model, losses, rows)
        assert set(whole_rows.served()) == {UPSTREAM}
        whole_rows.reset()
        loss, actual = gradients(model, losses, rows)
    assert set(whole_rows.served()) == {OURS}
    assert masks_read
    assert all(mask is None for mask in masks_read)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    total, tensor = relative_errors(expected, actual)
    assert total < 5e-6
    assert tensor < 1e-4


@pytest.mark.parametrize(("family", "how"), [*DAILY, *WEEKLY])
def test_inside_checkpoints_and_compiled_steps(tiny_model, masks_read, family, how):
    model = tiny_model(family)
    rows = tokens(2, 41)
    with patched():
        expected_loss, expected = gradients(model, losses, rows)
        masks_read.clear()
        if how == "checkpointed":
            with checkpointed(model.layers):
                loss, actual = gradients(model, losses, rows)
            assert all(mask is None for mask in masks_read)
        elif how == "compiled":
            value, tree = mx.compile(nn.value_and_grad(model, lambda rows: losses(model, rows)))(rows)
            loss, actual = value.item(), dict(tree_flatten(tree))
        else:
            # As mlx-lm's --grad-checkpoint: the layer gets other arrays, so a mask of a window is read.
            from mlx_lm.tuner.trainer import grad_checkpoint

            kinds = {type(layer): type(layer).__call__ for layer in model.layers}
            for kind in kinds:
                grad_checkpoint(next(layer for layer in model.layers if type(layer) is kind))
            try:
                loss, actual = gradients(model, losses, rows)
            finally:
                for kind, call in kinds.items():
                    kind.__call__ = call
    assert set(whole_rows.served()) == {OURS}
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_errors(expected, actual)[0] < 1e-5


@pytest.mark.parametrize("family", weekly_but(FAMILIES, "qwen3_5", "gemma3_text", "kimi_k3"))
def test_without_a_gradient_whole_rows_and_decoding_have_upstreams_bits(tiny_model, monkeypatch, family):
    from mlx_lm.models.cache import make_prompt_cache

    # On Metal the recurrence, too, is upstream's in evaluation, and so is the convolution.
    monkeypatch.setattr(backend, "device", lambda: "metal")
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    model = tiny_model(family)
    model.eval()
    prompt, following = tokens(2, 21), tokens(2, 3, seed=1)

    def infer() -> list[mx.array]:
        cache = make_prompt_cache(model)
        # A prompt may be read in pieces.
        found = [model(prompt), model(prompt[:, :16], cache=cache), model(prompt[:, 16:], cache=cache)]
        return found + [model(following[:, t : t + 1], cache=cache) for t in range(3)]

    expected = infer()
    mx.eval(expected)
    for training in (False, True):
        # A trainer that samples from a model in training mode: attention alone, as other patches look at the mode.
        for module in model.modules():
            if "Attention" in type(module).__name__ and not hasattr(module, "A_log"):
                module._set_training_mode(training)
        with patched():
            whole_rows.reset()
            actual = infer()
        assert set(whole_rows.served()) == {UPSTREAM}
        assert set(served()) == ({recurrence.BACKWARD, recurrence.UPSTREAM} if gated_delta_layers(model) else set())
        assert all(mx.array_equal(e, a) for e, a in zip(expected, actual, strict=True))


def test_a_gradient_through_a_cache(tiny_model):
    """A prefix in a cache, and a gradient of the tokens behind it: more keys than queries."""
    from mlx_lm.models.cache import make_prompt_cache

    model, prefix, rows = tiny_model("qwen3"), tokens(2, 7), tokens(2, 12, seed=1)

    def loss(model: nn.Module, rows: mx.array) -> mx.array:
        cache = make_prompt_cache(model)
        model(prefix, cache=cache)
        return next_token_loss(model(rows[:, :-1], cache=cache), rows)

    expected = gradients(model, loss, rows)
    with patched():
        actual = gradients(model, loss, rows)
    assert set(whole_rows.served()) == {OURS}
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert relative_errors(expected[1], actual[1])[0] < 5e-6


def test_every_transform_says_that_a_gradient_is_taken(tiny_model):
    model, rows = tiny_model("qwen3"), tokens(1, 9)
    parameters = model.trainable_parameters()

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        return losses(model, rows)

    def by_vjp() -> None:
        x = draw(1, 9, 64)
        mx.vjp(lambda x: [model.layers[0](x, "causal")], [x], [x])

    with patched():
        for take in (lambda: mx.grad(loss)(parameters), lambda: mx.value_and_grad(loss)(parameters), by_vjp):
            whole_rows.reset()
            take()
            assert set(whole_rows.served()) == {OURS}
        model.update(parameters)
    whole_rows.reset()
    assert mx.grad.__name__ == "grad"
    assert type(mx.grad) is type(mx.vmap)


def test_mlxs_own_may_be_forced(tiny_model, monkeypatch):
    """It calls the function that is replaced, and not its replacement."""
    monkeypatch.setenv("DELTATUNE_ATTENTION", "native")
    model, rows = tiny_model("gemma3_text"), tokens(2, 41)
    expected = gradients(model, losses, rows)
    with patched():
        actual = gradients(model, losses, rows)
    assert set(whole_rows.served()) == {OURS}
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert relative_errors(expected[1], actual[1])[0] < 5e-6


def test_mlx_lms_validation_fits_where_its_training_does(tiny_model):
    from mlx_lm.tuner import trainer

    model = tiny_model("qwen3")
    rows = [(tokens(1, 30, seed=seed)[0].tolist(), 0) for seed in range(2)]
    expected = trainer.evaluate(model, rows, 1, 2)
    with patched():
        importlib.import_module("mlx_lm.lora")
        actual = sys.modules["mlx_lm.lora"].evaluate(model, rows, 1, 2)
    assert set(whole_rows.served()) == {OURS}
    assert actual == pytest.approx(expected, rel=1e-6)


def test_a_compiled_function_of_mlx_vlm_is_not_traced_in_training():
    """It would keep deltatune's attention for inference. No other call has this scale, so nothing is traced before."""
    base = pytest.importorskip("mlx_vlm.models.base")
    q, k, v = (draw(1, 2, 33, 24, seed=seed) for seed in range(3))

    def both() -> list[mx.array]:
        return [base.ensure_fused_sdpa(q, k, v, 0.23), base.chunked_attention(q, k, v, 0.23, 16)]

    with patched():
        with whole_rows.whole_rows():
            ours = both()
        assert whole_rows.served() == {OURS: 2}
        alone = both()
    # The second function has three pieces of 16 queries.
    assert whole_rows.served() == {OURS: 2, UPSTREAM: 4}
    for one, other, upstreams in zip(ours, alone, both(), strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-6)
        assert mx.array_equal(other, upstreams)


ON_A_CPU = pytest.mark.skipif(backend.device() != "cpu", reason="only a CPU uses a BLAS")


def attended(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **options)


def differentiated(arrays: list[mx.array], call: Callable[..., mx.array]) -> list[mx.array]:
    weights = draw(2, 4, 9, 5, seed=9)
    value, found = mx.value_and_grad(lambda *arrays: (call(*arrays) * weights).sum(), argnums=list(range(len(arrays))))(
        *arrays
    )
    return [value, *found]


def heads() -> list[mx.array]:
    return [draw(2, 4, 9, 8), draw(2, 2, 9, 8, seed=1), draw(2, 2, 9, 5, seed=2)]


BOOLS = {
    "of pairs": lambda: mx.tril(mx.ones((9, 9))) > 0,
    "of padding": lambda: (mx.arange(9) < mx.array([[9], [6]]))[:, None, None],
    "of each head": lambda: mx.random.uniform(shape=(2, 4, 9, 9), key=mx.random.key(3)) < 0.9,
}


@pytest.mark.parametrize("mask", [None, "causal", *BOOLS])
@pytest.mark.parametrize("sinks", [False, True])
def test_masks_of_booleans_and_sinks(mask, sinks):
    mask = BOOLS[mask]() if mask in BOOLS else mask
    if isinstance(mask, mx.array) and mask.shape[-2:] == (9, 9):
        mask = mask | (mx.eye(9) > 0)  # Where a query sees nothing, deltatune gives zeros and MLX does not.
    arrays = heads() + ([draw(4, seed=4)] if sinks else [])

    def call(q: mx.array, k: mx.array, v: mx.array, *sinks: mx.array) -> mx.array:
        return attended(q, k, v, mask=mask, sinks=sinks[0] if sinks else None)

    expected = differentiated(arrays, call)
    with patched():
        actual = differentiated(arrays, call)
    assert whole_rows.served() == {OURS: 1}
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 9), (2, 1, 9, 9), (1, 1, 1, 9), (1, 4, 9, 9)])
def test_a_mask_of_floats_gets_its_gradient(shape):
    """One for all heads is deltatune's. One for each head is as large as the scores, so it stays MLX's."""
    arrays = [*heads(), draw(*shape, seed=5)]

    def call(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        return attended(q, k, v, mask=mx.tanh(mask))

    expected = differentiated(arrays, call)
    with patched():
        actual = differentiated(arrays, call)
    assert whole_rows.served() == {UPSTREAM if shape == (1, 4, 9, 9) else OURS: 1}
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_attention_that_deltatune_refuses_is_mlxs():
    q, k, v = heads()
    with patched(), whole_rows.whole_rows():
        assert attended(q, k, v, stream=mx.cpu).shape == (2, 4, 9, 5)
        assert whole_rows.served() == {UPSTREAM: 1}
        with pytest.raises(ValueError, match="mask"):
            attended(q, k, v, mask="casual")
        with pytest.raises(ValueError, match="rank"):
            attended(q[0], k[0], v[0])
        # MLX promotes what is mixed.
        assert attended(q.astype(mx.bfloat16), k, v).dtype == mx.float32
    assert whole_rows.served() == {UPSTREAM: 3, OURS: 1}


def test_masks_are_forgotten_with_their_arrays():
    with trace.having():
        mask = attention_mask(mx.array([[0, 0, 1]]))
        rule = rule_of(mask)
        assert rule.window is None
        assert rule.segments.shape == (1, 3)
        assert rule_of(mask + False) is None
        assert len(trace.current().known) == 1
        del mask
        gc.collect()
        assert len(trace.current().known) == 0


@ON_A_CPU
def test_a_faulty_blas_trains_through_deltatune_too(monkeypatch):
    """Both patches of the one function are in force: inference goes to the products of two rows."""
    monkeypatch.setattr(one_row_products, "probe", lambda: one_row_products.ProbeResult("planted", ("fault",)))
    monkeypatch.setattr(one_row_products, "_warned", {str(one_row_products.probe())})
    arrays = heads()
    expected = differentiated(arrays, attended)
    with patched():
        assert one_row_products.in_force()
        whole_rows.reset()
        actual = differentiated(arrays, attended)
        assert whole_rows.served() == {OURS: 1}
        single = attended(arrays[0][:, :, :1], *arrays[1:])
    assert whole_rows.served() == {OURS: 1, UPSTREAM: 1}
    assert mx.allclose(single, attended(arrays[0][:, :, :1], *arrays[1:]), rtol=1e-5, atol=1e-6)
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)
