"""Patched models of every family call deltatune, agree with upstream, and separate packed documents."""

import inspect
import itertools
import re
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

import other_towers
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops.causal_conv import causal_conv
from deltatune.ops.segments import segments
from deltatune.patches import PatchWarning, patched, recurrence, served, serving, whole_rows
from deltatune.patches.evidence import signature_text
from deltatune.patches.patch import in_force
from deltatune.patches.tables import mlx_lm
from families import weekly_but
from model_gradients import gradients, losses, relative_errors, tokens

FAMILIES = ("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing", "kimi_k3", "qwen3_5_moe")
# The layers of qwen3_5_moe that are tested here are those of qwen3_5. After a forgotten train() gates are of heads, or
# of channels and bounded.
DAILY = [(family, True) for family in FAMILIES[:-1]] + [("qwen3_5", False), ("kimi_k3", False)]


@pytest.mark.parametrize(
    ("family", "training"),
    [
        pytest.param(*case, marks=() if case in DAILY else pytest.mark.weekly)
        for case in itertools.product(FAMILIES, (True, False))
    ],
)
def test_values_and_gradients_are_upstreams(tiny_model, monkeypatch, family, training):
    if (family, training, backend.device()) == ("kimi_k3", False, "metal"):
        pytest.skip("upstream's kernel has no gradient")
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    # On "metal", upstream's own convolution runs, which allows a close comparison.
    monkeypatch.setattr(backend, "device", lambda: "metal")
    # test_experts.py covers experts.
    monkeypatch.setattr(patches, "PATCHES", mlx_lm.PATCHES + mlx_lm.RESIDUAL_WEIGHTS)
    model = tiny_model(family)
    model.train(training)
    rows = tokens(2, 21)
    expected_loss, expected = gradients(model, losses, rows)
    expected_logits = model(rows)
    with patched(model) as report:
        assert report.complete, str(report)
        whole_rows.reset()
        loss, actual = gradients(model, losses, rows)
        logits = model(rows)
    assert set(served()) == {recurrence.OURS if training else recurrence.BACKWARD}
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # With the same recurrence on both sides: 8e-7, and 2e-5 for one tensor of kimi_k3 whose gradient is tiny.
    total, tensor = relative_errors(expected, actual)
    assert total < 5e-6
    assert tensor < 1e-4
    if not training:
        assert mx.array_equal(logits, expected_logits)


# test_document_isolation.py compares documents of the others.
@pytest.mark.parametrize("family", weekly_but(FAMILIES, "qwen3_5", "kimi_linear", "olmo_hybrid", "kimi_k3"))
def test_packed_documents_train_as_they_do_alone(tiny_model, family):
    model = tiny_model(family)
    documents = [tokens(1, length, seed) for seed, length in enumerate((2, 13, 8, 3))]
    row = mx.concatenate(documents, axis=1)
    owner = mx.concatenate([mx.full(d.shape, i, mx.int32) for i, d in enumerate(documents)], axis=1)
    same = (owner[:, 1:] == owner[:, :-1]).astype(mx.float32)

    def packed(model: nn.Module, row: mx.array) -> mx.array:
        logits = model(row[:, :-1])
        return (nn.losses.cross_entropy(logits, row[:, 1:]) * same).sum()

    def thrice(model: nn.Module, document: mx.array) -> mx.array:
        return losses(model, mx.concatenate([document] * 3)) / 3

    def added(trees: list[dict[str, mx.array]]) -> dict[str, mx.array]:
        return {name: sum(tree[name] for tree in trees) for name in trees[0]}

    with patched(model):
        alone = [gradients(model, losses, document) for document in documents]
        control = [gradients(model, thrice, document)[1] for document in documents]
        with segments(owner[:, :-1]):
            loss, actual = gradients(model, packed, row)
    assert loss == pytest.approx(sum(value for value, _ in alone), rel=1e-5)
    # The size of rounding: a document compared with itself in a batch of three gives up to 1e-5 (4e-5 in one tensor).
    expected = added([tree for _, tree in alone])
    rounding = relative_errors(expected, added(control))
    total, tensor = relative_errors(expected, actual)
    assert rounding[0] < 1e-4
    assert total < 1e-5 + 4 * rounding[0]
    assert tensor < 1e-4 + 4 * rounding[1]


@pytest.mark.skipif(backend.device() == "metal", reason="is about other devices")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.weekly)])
@pytest.mark.parametrize("family", weekly_but(FAMILIES, "qwen3_5", "olmo_hybrid", "kimi_k3"))
def test_a_prompt_off_metal_is_ours(tiny_model, monkeypatch, family, device):
    """A prompt is read in pieces, as mlx-lm reads a long one; the model then decodes from the state that is left."""
    from mlx_lm.models.cache import make_prompt_cache

    # The choice is made for the device of that name; a CPU then runs what it can.
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "chunk")
    model = tiny_model(family)
    model.eval()
    prompt = tokens(2, 21 + recurrence.PROMPT_TOKENS + 2)

    def read() -> mx.array:
        cache = make_prompt_cache(model)
        pieces = mx.split(prompt, [21, 21 + recurrence.PROMPT_TOKENS, 22 + recurrence.PROMPT_TOKENS], axis=1)
        return mx.concatenate([model(piece, cache=cache) for piece in pieces], axis=1)

    expected = read()
    mx.eval(expected)
    with patched():
        whole_rows.reset()
        actual = read()
        served_by = served()
    assert served_by[recurrence.OURS] == served_by[recurrence.UPSTREAM] > 0
    assert not served_by[recurrence.BACKWARD]
    assert mx.abs(actual - expected).max().item() < 1e-4 * mx.abs(expected).max().item()


# The signatures of the function in mlx-lm, and in mlx-vlm 0.7.0 and later.
PLAIN = "q, k, v, a, b, A_log, dt_bias, state=None, mask=None, use_kernel=True"
STEPS = ", state_steps=None, cache=None, cache_index=1"
VERSIONS = [PLAIN.replace("use", "*, use") + ", lower_bound=None, allow_neg_eigval=False"]
VERSIONS += [PLAIN + bound + steps for bound in ("", ", lower_bound=None") for steps in ("", STEPS)]


@pytest.mark.parametrize("parameters", VERSIONS)
def test_every_version_of_the_function_is_called_as_its_callers_do(parameters):
    """The replacement has the version's signature and takes calls as its models make them, installed or not."""
    calls = []

    def upstream(*arguments, **options):
        calls.append((len(arguments), options))
        return arguments[2], arguments[7]

    upstream.__signature__ = inspect.signature(eval(f"lambda {parameters}: None"))
    ours = recurrence.update(upstream)
    assert signature_text(ours) == f"({parameters})"
    with pytest.raises(TypeError, match="missing a required argument: 'q'"):
        ours()
    arrays = [mx.ones((1, 1, 1, 4))] * 3 + [mx.ones((1, 1, 1))] * 2 + [mx.ones(1)] * 2
    state = mx.ones((1, 1, 4, 4))
    if "*" not in parameters:
        ours(*arrays, state, None, True)
    ours(*arrays, state, None, use_kernel=True)
    assert {(count, options.pop("use_kernel")) for count, options in calls} == {(9, True)}
    assert all(set(options) <= upstream.__signature__.parameters.keys() for _, options in calls)


def test_a_parameter_that_nobody_knows_is_refused():
    def upstream(q, k, v, a, b, A_log, dt_bias, state=None, mask=None, use_kernel=True, decay=2):
        raise AssertionError("not called")

    assert "decay was not expected" in mlx_lm._same_update(upstream, None)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_a_state_of_its_own(tiny_model, use_kernel, length):
    """Upstream serves decoding. deltatune serves training from a state, including the gradient of the state."""
    from mlx_lm.models.gated_delta import gated_delta_update as upstream

    mx.random.seed(1)
    of_tokens = [(1, length, *sizes) for sizes in ((1, 4), (1, 4), (2, 3), (2,), (2,))]
    arrays = [mx.random.normal(shape) for shape in (*of_tokens, (2,), (2,), (1, 2, 3, 4))]

    def loss(function: Callable[..., tuple[mx.array, mx.array]], *arrays: mx.array) -> mx.array:
        y, state = function(*arrays, use_kernel=use_kernel)
        return mx.sin(y).sum() + mx.cos(state).sum()

    every = list(range(1, 9))
    expected = mx.value_and_grad(loss, argnums=every)(upstream, *arrays)
    with patched():
        from mlx_lm.models.gated_delta import gated_delta_update as ours

        whole_rows.reset()
        actual = mx.value_and_grad(loss, argnums=every)(ours, *arrays)
        assert set(served()) == {recurrence.OURS if length > 1 and not use_kernel else recurrence.UPSTREAM}
    assert mx.allclose(expected[0], actual[0], rtol=1e-5)
    for one, other in zip(expected[1], actual[1], strict=True):
        assert mx.abs(one - other).max().item() < 2e-5 * max(1.0, mx.abs(one).max().item())


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_of_a_cpu_training_step(monkeypatch, bias):
    shapes = []

    def recorded(x, *arguments, **options):
        shapes.append(x.shape)
        return causal_conv(x, *arguments, **options)

    monkeypatch.setattr(mlx_lm, "causal_conv", recorded)
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    conv = nn.Conv1d(6, 6, 4, groups=6, bias=bias)
    x, weights = mx.random.normal((2, 12, 6)), mx.random.normal((2, 9, 6))

    def loss(conv: nn.Module, x: mx.array) -> mx.array:
        return (conv(x) * weights).sum()

    def everything() -> list[mx.array]:
        value, by_parameter = nn.value_and_grad(conv, loss)(conv, x)
        by_input = mx.grad(lambda x: loss(conv, x))(x)
        return [conv(x), value, by_input, *(array for _, array in tree_flatten(by_parameter))]

    expected = everything()
    mx.eval(expected)
    with patched():
        actual = everything()
        assert set(shapes) == {(2, 9, 6)}
        shapes.clear()
        dense, wide = nn.Conv1d(6, 6, 4), nn.Conv1d(6, 6, 4, groups=6, padding=3)
        assert dense(x).shape == (2, 9, 6)
        assert wide(x).shape == (2, 15, 6)
        conv.eval()
        assert mx.array_equal(conv(x), expected[0])
    assert not shapes
    assert len(actual) == (5 if bias else 4)
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_state_and_segments_are_refused(tiny_model):
    from mlx_lm.models.cache import make_prompt_cache

    model = tiny_model("qwen3_5")
    row, owner = tokens(1, 4), mx.zeros((1, 4), mx.int32)
    with patched(), segments(owner), pytest.raises(ValueError, match="no cache with segments"):
        model(row, cache=make_prompt_cache(model))
    with patched(), segments(owner), pytest.raises(ValueError, match="segments are for 4 positions"):
        model(tokens(1, 5))


def transformed(how: str) -> Callable[..., mx.array]:
    if how == "compile":
        return lambda model, rows: mx.compile(lambda rows: losses(model, rows))(rows)
    if how == "checkpoint":
        # The tokens are no argument: mx.checkpoint differentiates every argument, and indices have no gradient.
        return lambda model, rows: mx.checkpoint(lambda parameters: (model.update(parameters), losses(model, rows))[1])(
            model.trainable_parameters()
        )
    return lambda model, rows: mx.vmap(lambda row: losses(model, row[None]))(rows).sum()


@pytest.mark.parametrize(
    ("how", "training"), [("compile", True), ("checkpoint", True), ("vmap", True), ("compile", False)]
)
def test_inside_other_transforms(tiny_model, monkeypatch, how, training):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    monkeypatch.setenv("DELTATUNE_ATTENTION", "naive")
    model = tiny_model("olmo_hybrid")
    model.train(training)
    rows = tokens(2, 9)
    with patched(model):
        expected_loss, expected = gradients(model, losses, rows)
        loss, actual = gradients(model, transformed(how), rows)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative_errors(expected, actual)[0] < 1e-5


def test_a_layer_replaced_by_somebody_else_is_named(tiny_model, monkeypatch):
    from mlx_lm.models import qwen3_5

    model = tiny_model("qwen3_5")
    monkeypatch.setattr(qwen3_5.GatedDeltaNet, "__call__", lambda self, x, mask=None, cache=None: x)
    with pytest.warns(PatchWarning) as warned, patched(model, strict=False) as report:
        assert not any(serving(model).delta.values())
    assert sum(bool(re.search("linear_attn .* does not call deltatune", str(one.message))) for one in warned) == 3
    assert len(report.unreached) == 3


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
