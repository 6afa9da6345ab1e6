"""Kimi K3's residual weights follow the parameters that they are computed from, in mlx-lm and in mlx-vlm."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

import other_towers
from deltatune.patches import patched, serving
from deltatune.patches.patch import in_force

ROWS = mx.random.randint(7, 300, (1, 9), key=mx.random.key(0))


@pytest.fixture(params=["mlx-lm", "mlx-vlm"])
def model(request, tiny_model):
    if request.param == "mlx-lm":
        return tiny_model("kimi_k3")
    pytest.importorskip("mlx_vlm")
    mx.random.seed(0)
    model = other_towers.build("kimi_k3")
    # Biases and norms that begin as constants hide a gradient.
    model.update(tree_map(lambda weight: weight + 0.1 * mx.random.normal(weight.shape), model.parameters()))
    return model


def loss(model, rows=ROWS):
    text = getattr(model, "language_model", model)
    logits = text(rows[:, :-1])
    return nn.losses.cross_entropy(getattr(logits, "logits", logits), rows[:, 1:]).mean()


def caches(model):
    return [
        value
        for module in model.modules()
        for name in ("_attn_res_w_eff", "_mlp_res_w_eff", "_output_res_w_eff")
        if (value := getattr(module, name, None)) is not None
    ]


def test_an_evaluation_uses_the_weights_of_the_last_step(model):
    with patched(model):
        model.train()
        mx.eval(loss(model))
        model.update(tree_map(lambda weight: weight * 1.1, model.parameters()))
        model.eval()
        evaluated = loss(model)
        model.train()
        assert loss(model).item() == pytest.approx(evaluated.item(), rel=1e-5)


def test_every_residual_projection_has_its_gradient_after_the_trace(model):
    def gradients():
        found = tree_flatten(nn.value_and_grad(model, loss)(model)[1])
        return {name: value for name, value in found if "res_proj" in name}

    model.train()
    with patched(model):
        expected = gradients()
        model.eval()
        assert all(serving(model).delta.values())
        found = gradients()
    assert len(found) == 9
    # The first layer weighs one block alone, whatever its projection.
    assert sum(mx.abs(value).max().item() > 1e-6 for value in expected.values()) == 8
    # Upstream's form of the recurrence, which serves in evaluation, rounds otherwise.
    assert all(mx.abs(found[name] - expected[name]).max() <= 1e-3 * mx.abs(expected[name]).max() for name in expected)
    assert not caches(model)


def test_nothing_computed_under_the_patches_is_left_behind(model):
    model.eval()
    with patched(model):
        mx.eval(loss(model))
    assert not caches(model)


@pytest.mark.any_blas
def test_a_model_that_cannot_be_traced_leaves_no_patch_in_force(model, monkeypatch):
    target = "mlx_lm.models.gated_delta.gated_delta_update"

    def broken(self, *arguments, **keywords):
        raise RuntimeError("no forward pass")

    monkeypatch.setattr(type(model), "__call__", broken)
    with pytest.raises(RuntimeError, match="no forward pass"), patched(model):
        raise AssertionError("not reached")
    assert in_force(target) is None
    with patched():
        assert in_force(target) is not None
    assert in_force(target) is None
