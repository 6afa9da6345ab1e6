"""Activations, norms and layers are replaced on NVIDIA GPUs only, and compute the same there; so do whole models."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, olmo_hybrid, qwen3_next

import model_gradients
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.causal_conv import causal_conv
from deltatune.ops.operator import kernel_operator
from deltatune.ops.pointwise import conv, gating, norms, silu, weighted_norms
from deltatune.ops.segments import segments
from deltatune.ops.tracing import trace
from deltatune.patches import patched
from deltatune.patches.tables import mlx_lm, pointwise
from deltatune.patches.whole_rows import PROMPT_TOKENS, whole_rows
from families import FAMILIES
from last_place import parameters_one_unit_off
from model_gradients import losses


@pytest.fixture
def on_cuda(monkeypatch):
    """The patches of an NVIDIA GPU. On other machines plain forms stand for the kernels, and a list names the calls."""
    monkeypatch.setattr(patches, "_of_device", lambda: (*pointwise.ACTIVATIONS, *pointwise.PATCHES))
    if backend.device() == "cuda":
        return
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    for module, name in ((silu, "serves"), (norms, "gated_norm_serves")):
        monkeypatch.setattr(module, name, lambda *_: True)
    served = []

    def record(name, value):
        served.append(name)
        return value

    def plain_norm(x, factor, eps):
        return factor * x * norms.inverse_rms(x, eps)

    monkeypatch.setattr(silu, "swiglu", lambda g, x: record("swiglu", silu._plain(g, x)[0]))
    monkeypatch.setattr(
        norms, "gated_norm", lambda x, w, g, eps: record("gated norm", plain_norm(x, w, eps) * g * mx.sigmoid(g))
    )
    return served


def draw(*shapes):
    keys = mx.random.split(mx.random.key(5), len(shapes))
    return [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]


def results():
    g, x = draw((2, 5, 2, 32), (2, 5, 2, 32))
    found = [activations.swiglu(g, x), qwen3_next.swiglu(g, x)]
    found += [qwen3_next.Qwen3NextRMSNormGated(32)(x, g), qwen3_next.Qwen3NextRMSNormGated(32)(x)]
    return [*found, olmo_hybrid.RMSNormGated(32)(x, g)]


def test_every_holder_gets_them_and_they_compute_the_same(on_cuda):
    wanted = results()
    with patched() as report, whole_rows():
        assert not report.left_alone
        found = results()
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(np.array(one) - np.array(other)).max() < 2e-6
    if on_cuda is not None:
        assert on_cuda == ["swiglu"] * 2 + ["gated norm"] + ["gated norm"]


def test_a_convolution_and_its_silu_are_one(on_cuda, monkeypatch):
    layer = nn.Conv1d(8, 8, 4, groups=8, bias=False)
    biased = nn.Conv1d(8, 8, 4, groups=8)
    (x,) = draw((2, 9, 8))
    x[:, :3] = 0
    documents = mx.array([[0, 0, 1, 1, 1, 2]] * 2)

    def doubled(x, weight, segments):
        y = causal_conv(x[:, 3:], weight, initial_state=x[:, :3], segments=segments)
        return 2 * y * mx.sigmoid(y)

    def run():
        found = [nn.silu(layer(x)), nn.silu(layer(x) + 0.5), nn.silu(biased(x))]
        with segments(documents):
            return [*found, nn.silu(layer(x))]

    with patched(), trace.having():
        monkeypatch.setattr(conv, "serves", lambda *_: False)
        wanted = run()
        monkeypatch.setattr(conv, "serves", lambda *_: True)
        monkeypatch.setattr(conv, "conv_silu", doubled)
        found = run()
        assert len(trace.current().known) == 0
        layer.eval()
        assert mx.allclose(nn.silu(layer(x)), wanted[0], atol=1e-6)
    for one, other, ours in zip(found, wanted, (2, 1, 1, 2), strict=True):
        assert mx.allclose(one, ours * other, atol=1e-6)


def test_arrays_beyond_the_kernels_stay_upstreams(on_cuda, monkeypatch):
    for module, name in ((silu, "serves"), (norms, "gated_norm_serves")):
        monkeypatch.setattr(module, name, lambda *_: False)
    wanted = results()
    with patched(), whole_rows():
        found = results()
    assert all(mx.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not on_cuda


def test_a_decoder_never_enters_the_kernels(on_cuda):
    """The few tokens of a decoder's call take MLX's own operations, also with many rows; a prompt's do not."""
    gate, x = draw((64, 1, 32), (64, 1, 32))
    prompt = mx.ones((1, PROMPT_TOKENS, 32))
    norm = qwen3_next.Qwen3NextRMSNormGated(32)
    wanted = qwen3_next.swiglu(gate, x), norm(x, gate)
    with patched():
        found = qwen3_next.swiglu(gate, x), norm(x, gate)
        assert not on_cuda
        qwen3_next.swiglu(prompt, prompt)
        assert on_cuda in (None, ["swiglu"])
    assert all(map(mx.array_equal, found, wanted))


@pytest.fixture
def calls(monkeypatch):
    """The norms that deltatune computes, with MLX's operations in the kernels' place; the device passes for a GPU."""
    names = []

    def alone(x, weight, eps):
        names.append("alone")
        return mx.fast.rms_norm(x, weight, eps)

    def branch(x, weight, eps):
        names.append("branch")
        return [x, mx.fast.rms_norm(x, weight, eps)]

    def of_sum(x, other, weight, eps):
        names.append("sum")
        return [x + other, mx.fast.rms_norm(x + other, weight, eps)]

    for name, plain in (("weighted_norm", alone), ("branch_norm", branch), ("sum_norm", of_sum)):
        monkeypatch.setattr(pointwise, name, plain)
    monkeypatch.setattr(pointwise, "serves", lambda x, weight, eps: True)
    monkeypatch.setattr(patches, "_of_device", lambda: pointwise.NORMS)
    return names


def layer_of(tiny_model, family):
    """A tiny model's first layer, which mixes tokens by the recurrence, and an input."""
    layer = tiny_model(family).layers[0]
    return layer, mx.random.normal((2, 5, layer.input_layernorm.weight.shape[0]), key=mx.random.key(1))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "qwen3_5_moe", "bailing"])
def test_a_layer_is_the_same_with_its_sums_in_the_norms(tiny_model, calls, family):
    layer, x = layer_of(tiny_model, family)
    wanted = layer(x)
    with patched() as report, whole_rows():
        assert not report.left_alone
        found = layer(x)
    assert [name for name in calls if name != "alone"] == ["branch", "sum"]
    assert mx.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_another_norm_or_dtype_keeps_the_layer(tiny_model, calls):
    layer, x = layer_of(tiny_model, "qwen3_5")
    mixer = type(layer.linear_attn)

    class Wide(mixer):
        def __call__(self, *arguments):
            return super().__call__(*arguments).astype(mx.float16)

    def same(found, wanted):
        # Other patches change the last bits of what the mixer rounds to fp16.
        return mx.allclose(found, wanted, rtol=2.0**-10, atol=2.0**-10)

    class Norm(nn.RMSNorm):
        pass

    layer.linear_attn.__class__ = Wide
    wanted = layer(x)
    with patched(), whole_rows():
        assert same(layer(x), wanted)
    assert calls == ["branch", "alone"]
    calls.clear()
    layer.input_layernorm.__class__ = Norm
    with patched(), whole_rows():
        assert same(layer(x), wanted)
    assert "sum" not in calls
    assert "branch" not in calls


@pytest.mark.skipif(backend.device() == "cuda", reason="other machines only")
def test_other_machines_keep_upstreams():
    upstream = nn.RMSNorm.__call__
    assert not {*pointwise.PATCHES, *pointwise.NORMS[1:]} & set(patches._of_device())
    with patched():
        # An Apple GPU has another one in its place (kept_inputs.py).
        assert (nn.RMSNorm.__call__ is upstream) == (backend.device() == "cpu")


def test_few_elements_stay_upstreams(monkeypatch):
    """A decoder's single token is below the least size, and the bits of its norm are MLX's."""
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    norm = nn.RMSNorm(64)
    x = mx.random.normal((1, 1, 64), key=mx.random.key(0))
    monkeypatch.setattr(patches, "_of_device", lambda: pointwise.NORMS)
    wanted = norm(x)
    with patched():
        assert mx.array_equal(norm(x), wanted)


CONVS = ("conv and silu of documents", "conv, silu and norms of documents", "conv and silu", "conv, silu and norms")
AROUND_ATTENTION = ("turned heads and gates", "turned heads", "times gate")
NAMES = ("gated norm", *CONVS, "gates", "swiglu", *AROUND_ATTENTION)
# These families convolve queries, keys and values together, and norm them in the same pass.
TOGETHER = ("qwen3_5", "qwen3_next")
LAYERS = {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 16}
# Two layers: one mixes tokens by the recurrence, and one by attention.
SIZES = {
    "qwen3_5": {"linear_value_head_dim": 16, "num_hidden_layers": 2, "full_attention_interval": 2},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "linear_attn_config": FAMILIES["kimi_linear"]["linear_attn_config"] | LAYERS,
    },
}
# The kernels that each family uses besides that of its convolution.
SERVED = {
    "qwen3_5": {*AROUND_ATTENTION, "gates", "gated norm", "swiglu"},
    # Too few of its elements turn.
    "qwen3_next": {"gates", "gated norm", "swiglu"},
    "olmo_hybrid": {"gates", "gated norm"},
    "kimi_linear": {"swiglu"},
}
# The weighted norms of every family: alone, of a layer's input, and of the sum behind its first half.
NORMS = {"alone", "branch", "sum"}


# Each of the two convolutions, with documents and without; test_pointwise_layers.py has the norms of every family.
DAILY = [("qwen3_5", True), ("kimi_linear", False)]
WEEKLY = [
    pytest.param(family, packed, marks=pytest.mark.weekly)
    for family in SERVED
    for packed in (True, False)
    if (family, packed) not in DAILY
]


def as_on_cuda(monkeypatch, passes_on_host) -> tuple[list[str], set[str]]:
    """From here on the host machine runs every kernel on 8 elements or more: the passes and the norms that ran."""
    normed: set[str] = set()
    weighted = weighted_norms._function

    def function(kind, eps):
        normed.add(kind)
        return weighted(kind, eps)

    monkeypatch.setattr(weighted_norms, "_function", function)
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    for module in (recomputation, conv, gating):
        monkeypatch.setattr(module, "LEAST", 8)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    return passes_on_host(*weighted_norms.FILES), normed


def conditioned(model, rows, owner, expected: dict[str, mx.array]) -> tuple[float, dict[str, float]]:
    """How far all gradients together, and each one, move when parameters move by a unit: the largest of four draws."""
    held, draws = model.parameters(), []
    for seed in range(4):
        model.update(parameters_one_unit_off(model, seed))
        draws.append(distances(gradients(model, rows, owner)[1], expected))
    model.update(held)
    each = {name: max(draw[name] for draw in draws) for name in expected}
    return max(together(draw) for draw in draws), each


def distances(found: dict[str, mx.array], expected: dict[str, mx.array]) -> dict[str, float]:
    return {name: float(mx.linalg.norm(found[name] - expected[name])) for name in expected}


def together(norms: dict[str, float]) -> float:
    return float(np.hypot.reduce(list(norms.values())))


def gradients(model, rows, owner):
    def loss(model, rows):
        with segments(owner):
            return losses(model, rows)

    with patched():
        return model_gradients.gradients(model, loss, rows)


@pytest.mark.any_blas
@pytest.mark.skipif(backend.device() != "cpu", reason="the host machine needs a CPU")
@pytest.mark.parametrize(("family", "packed"), [*DAILY, *WEEKLY])
def test_losses_and_gradients_stay_the_same(tiny_model, passes_on_host, monkeypatch, family, packed):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    # Experts stay upstream's.
    monkeypatch.setattr(patches, "PATCHES", mlx_lm.PATCHES)
    model = tiny_model(family, **SIZES.get(family, {"linear_value_head_dim": 16}))
    model.train()
    rows = mx.random.randint(0, 320, (2, 22), key=mx.random.key(1))
    owner = mx.array(np.tile(np.repeat([0, 1, 2], 7), (2, 1))) if packed else None
    wanted, expected = gradients(model, rows, owner)
    condition = conditioned(model, rows, owner, expected)
    passes, normed = as_on_cuda(monkeypatch, passes_on_host)
    found, actual = gradients(model, rows, owner)
    convolution = "conv, silu and norms" if family in TOGETHER else "conv and silu"
    wanted_passes = SERVED[family] | NORMS | {f"{convolution} of documents" if packed else convolution}
    served = {next(name for name in NAMES if each.startswith(name)) for each in passes}
    assert served | normed == wanted_passes
    assert found == pytest.approx(wanted, rel=1e-6)
    assert expected.keys() == actual.keys()
    # A kernel rounds a value in up to four places where upstream does not, by half a unit each: two units in all. Their
    # effect on the gradients depends on the model: in kimi_linear one unit moves them by about 1e-4.
    off, (all_allowed, allowed) = distances(actual, expected), condition
    assert together(off) < 2 * all_allowed
    # The error of one tensor varies more between draws than that of all together.
    assert all(off[name] <= 8 * allowed[name] for name in off), {name: (off[name], allowed[name]) for name in off}
