"""Patched models train through deltatune's attention with upstream's numbers, and infer with upstream's bits."""

import importlib
import itertools
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from deltatune.layers import gated_delta_layers
from deltatune.machine import backend
from deltatune.ops.checkpoint import checkpointed
from deltatune.ops.segments import segments
from deltatune.patches import patched, recurrence, served, whole_rows
from deltatune.patches.tables import attention as table
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


@pytest.mark.parametrize("family", FAMILIES)
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
        found = [model(prompt), model(prompt, cache=cache)]
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
            recurrence.reset()
            actual = infer()
        assert set(whole_rows.served()) == {UPSTREAM}
        assert set(served()) == ({recurrence.BACKWARD, recurrence.UPSTREAM} if gated_delta_layers(model) else set())
        assert all(mx.array_equal(e, a) for e, a in zip(expected, actual, strict=True))


def test_text_is_generated_with_upstreams_bits(tiny_checkpoint):
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(tiny_checkpoint("qwen3")))

    def generate() -> list[tuple[int, mx.array]]:
        prompt = tokens(1, 50)[0].tolist()
        return [(r.token, r.logprobs) for r in stream_generate(model, tokenizer, prompt, 8, prefill_step_size=16)]

    expected = generate()
    with patched():
        actual = generate()
    assert set(whole_rows.served()) == {UPSTREAM}
    assert [token for token, _ in actual] == [token for token, _ in expected]
    assert all(mx.array_equal(e, a) for (_, e), (_, a) in zip(expected, actual, strict=True))


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


def test_a_module_that_holds_mlxs_function_by_value_is_reached():
    holder = ModuleType("holder_of_attention")
    holder.attention = upstream = mx.fast.scaled_dot_product_attention
    sys.modules["holder_of_attention"] = holder
    try:
        with patched() as report:
            (applied,) = [each for each in report.applied if each.patch.name == "fast.scaled_dot_product_attention"]
            assert applied.holders == ("holder_of_attention", "mlx.core.fast")
            assert holder.attention is mx.fast.scaled_dot_product_attention is not upstream
        assert holder.attention is mx.fast.scaled_dot_product_attention is upstream
    finally:
        del sys.modules["holder_of_attention"]


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


def test_a_window_and_packed_documents_at_once(tiny_model):
    """gemma3 with windows of 16 tokens and documents of 30 and 20: each has the loss that it has alone."""
    model = tiny_model("gemma3_text")
    documents = [tokens(1, 30), tokens(1, 20, seed=1)]
    row = mx.concatenate(documents, axis=1)
    owner = mx.array([[0] * 30 + [1] * 20])
    with patched():
        alone = [model(document) for document in documents]
        with segments(owner):
            together = model(row)
    assert set(whole_rows.served()) == {UPSTREAM, OURS}
    assert mx.abs(together - mx.concatenate(alone, axis=1)).max().item() < 1e-4


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
