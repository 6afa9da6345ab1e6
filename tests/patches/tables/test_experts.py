"""Layers of experts call expert_block in training, and agree with upstream."""

import importlib
import inspect

import mlx.core as mx
import mlx.nn as nn
import pytest

from adapter_checks import value_and_gradients
from deltatune.lora import LoRASwitchLinear, convert_to_lora
from deltatune.machine import backend
from deltatune.options.config import LoraConfig
from deltatune.patches import patched
from deltatune.patches.tables import experts
from families import weekly_but
from model_gradients import without_gradient

FAMILIES = ("qwen3_5_moe", "qwen3_next", "kimi_linear", "bailing", "kimi_k3")


@pytest.fixture
def served(monkeypatch):
    """A list with an entry for each call of expert_block: whether it was given scores."""
    calls = []

    def spy(x, indices, scores, *projections, **options):
        calls.append(scores is not None)
        return expert_block(x, indices, scores, *projections, **options)

    expert_block = experts.expert_block
    monkeypatch.setattr(experts, "expert_block", spy)
    return calls


def small_block(package: str, family: str, name: str) -> nn.Module:
    """The family's block with 8 experts, built from its sizes alone."""
    from types import SimpleNamespace

    where = f"{package}.models.{family}" + (".language" if package == "mlx_vlm" else "")
    sizes = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
    sizes |= {"intermediate_size": 24, "num_local_experts": 8, "norm_topk_prob": True, "mlp_bias": False}
    sizes |= {"shared_expert_intermediate_size": 24, "num_experts_per_token": 3}
    return getattr(importlib.import_module(where), name)(SimpleNamespace(**sizes))


class Model(nn.Module):
    """A model of one block, as convert_to_lora needs it."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.layers = [block]

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.layers[0](mx.zeros((*tokens.shape, 32)))


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in model.named_modules() if "switch_mlp" in module]


def adapt(model: nn.Module) -> None:
    """Add LoRA to every projection, with a B that is not zero."""
    convert_to_lora(model, LoraConfig(rank=3, scale=2.0))
    mx.random.seed(1)
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape)


def compare(block: nn.Module, served: list[bool], width: int) -> None:
    """Assert that a block has upstream's output and gradients, and that expert_block always gets the scores."""
    block.train()
    x, dy = (mx.random.normal((2, 23, width), key=mx.random.key(seed)) for seed in (7, 8))
    with pytest.MonkeyPatch.context() as upstream:
        # Older versions let gradients reach the indices of the chosen experts, which newer MLX refuses.
        upstream.setattr(mx, "argpartition", without_gradient(mx.argpartition))
        wanted = value_and_gradients(block, block, x, dy)
    mx.eval(wanted)
    assert not served
    with patched():
        found = value_and_gradients(block, block, x, dy)
    assert served
    assert all(served), "the outputs of all experts were held"
    assert found.keys() == wanted.keys()
    assert any("switch_mlp.down_proj" in name for name in found)
    for name, array in wanted.items():
        assert mx.abs(found[name] - array).max() <= 4e-6 * mx.abs(array).max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_families(tiny_model, served, family):
    model = tiny_model(family)
    adapt(model)
    compare(blocks(model)[-1], served, 64)


@pytest.mark.parametrize("family", weekly_but(FAMILIES, "qwen3_5_moe", "bailing"))
def test_a_forgotten_train_has_its_gradient(tiny_model, family):
    """Its forward pass is upstream's bit for bit."""
    block = blocks(tiny_model(family))[-1]
    x, dy = (mx.random.normal((2, 23, 64), key=mx.random.key(seed)) for seed in (7, 8))
    block.eval()
    forward = block(x)
    with patched():
        wanted, found = (value_and_gradients(block.train(mode), block, x, dy) for mode in (True, False))
    assert mx.array_equal(found["y"], forward)
    for name, array in wanted.items():
        assert mx.abs(found[name] - array).max() <= 4e-6 * mx.abs(array).max(), name


@pytest.mark.parametrize(
    ("package", "family", "name"),
    [("mlx_lm", f, n) for f, n in experts._LM_BLOCKS.items() if f in ("qwen3_moe", "olmoe", "mixtral", "qwen3_next")]
    + [("mlx_vlm", f, n) for f, n in experts._VLM_BLOCKS.items() if f in ("qwen3_5_moe", "qwen3_next")],
)
def test_blocks(served, package, family, name):
    """With adapters; the check of each record compares the block alone."""
    pytest.importorskip(package)
    mx.random.seed(0)
    block = small_block(package, family, name)
    adapt(Model(block))
    compare(block, served, 32)


def test_a_layer_by_itself_keeps_outputs_apart(served):
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    mx.random.seed(0)
    indices = mx.random.randint(0, 5, (4, 3))
    x = mx.random.normal((4, 32))
    for kind in (SwitchGLU, SwitchMLP):
        layer = kind(32, 24, 5, bias=True)
        wanted = layer(x, indices)
        with patched():
            found = layer(x, indices)
        assert found.shape == (4, 3, 32)
        assert mx.abs(found - wanted).max() < 1e-6
    assert served == [False, False]


def test_any_use_of_deferred_outputs_gives_upstreams_numbers(served):
    from mlx_lm.models.switch_layers import SwitchGLU

    mx.random.seed(0)
    layer, indices, x = SwitchGLU(32, 24, 5), mx.random.randint(0, 5, (4, 3)), mx.random.normal((4, 32))
    scores = mx.random.uniform(shape=(4, 3))

    class Block(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            return self.then(layer(x, indices))

    block = Block()
    ours = experts.weighted_block(Block.__call__)
    for then in (
        lambda y: (y * scores[..., None]).sum(axis=-2),
        lambda y: (y * scores[..., None]).sum(axis=1, keepdims=True),
        lambda y: (y * scores[..., None]).sum(axis=0),
        lambda y: (y * scores[..., None]).astype(mx.float16),
        lambda y: (y * 2.0).sum(axis=-2),
        lambda y: y.sum(axis=-2),
        lambda y: y.reshape(12, 32).astype(y.dtype),
    ):
        block.then = then
        wanted = block(x)
        with patched():
            found = ours(block, x)
        assert found.shape == wanted.shape
        assert mx.abs(found - wanted).max() < 1e-5


def test_inference_and_unknown_projections_stay_upstreams(served, tiny_model):
    model = tiny_model("qwen3_5_moe")
    block = blocks(model)[0]
    x = mx.random.normal((1, 9, 64))
    model.eval()
    wanted = block(x)
    with patched():
        assert mx.array_equal(block(x), wanted)
        model.train()
        block.switch_mlp.up_proj = Doubled(block.switch_mlp.up_proj)
        block(x)
    assert not served


class Doubled(nn.Module):
    """A projection of a kind that deltatune does not know."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return 2 * self.inner(x, indices, sorted_indices=sorted_indices)


@pytest.mark.skipif(backend.device() != "cpu", reason="evaluation is upstream's where MLX has half precision")
def test_half_precision_on_a_cpu_runs_in_evaluation_too(served, tiny_model):
    model = tiny_model("qwen3_5_moe")
    model.set_dtype(mx.bfloat16)
    model.eval()
    with patched():
        logits = model(mx.array([[3, 4, 5]]))
        mx.eval(logits)
    assert served
    assert mx.all(mx.isfinite(logits))


NVFP4 = {"bits": 4, "group_size": 16, "mode": "nvfp4"}


def nvfp4_experts(kind: str) -> tuple[nn.Module, dict[str, mx.array]]:
    """A SwitchGLU of 5 nvfp4 experts with a scale each, as mlx-lm or mlx-vlm has them, and its plain weights."""
    mx.random.seed(0)
    package = "mlx_lm" if kind == "global_scale" else "mlx_vlm"
    layers = importlib.import_module(f"{package}.models.switch_layers")
    layer, plain = layers.SwitchGLU(32, 48, 5), {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        if kind == "global_scale":
            packed = layer[name].to_quantized(**NVFP4, global_scale=True)
            each = zip(packed.weight, packed.scales, packed.global_scale, strict=True)
            plain[name] = mx.stack([mx.dequantize(w, s, global_scale=g, **NVFP4, dtype=mx.float32) for w, s, g in each])
        else:
            scaled = pytest.importorskip("mlx_vlm.quantization.nvfp4").ScaledQuantizedSwitchLinear
            packed = scaled(layer[name].to_quantized(**NVFP4), mx.random.uniform(2.0, 3.0, (5,)), kind)
            factor = packed.global_scale if kind == "weight_scale_2" else 1 / packed.global_scale
            plain[name] = mx.dequantize(packed.weight, packed.scales, **NVFP4) * factor[:, None, None]
        layer[name] = packed
    return layer, {name: weight.astype(mx.float32) for name, weight in plain.items()}


class Called(nn.Module):
    """A layer of experts that always gets the same indices."""

    def __init__(self, layer: nn.Module, indices: mx.array):
        super().__init__()
        self.layer, self._indices = layer, indices

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x, self._indices)


@pytest.mark.parametrize("kind", ["global_scale", "weight_scale_2", "weight_global_scale"])
def test_nvfp4_with_a_scale_for_each_expert(served, kind):
    """mlx-lm has one kind, for which MLX has no product on a CPU; mlx-vlm has two, which its own code evaluates."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

    if kind == "global_scale" and "global_scale" not in inspect.signature(SwitchLinear.to_quantized).parameters:
        pytest.skip("this mlx-lm has no scale for each expert")
    layer, plain = nvfp4_experts(kind)
    wanted_layer = SwitchGLU(32, 48, 5)
    for name, weight in plain.items():
        wanted_layer[name].weight = weight
    for each in (layer, wanted_layer):
        mx.random.seed(1)
        for name in plain:
            adapter = each[name] = LoRASwitchLinear.from_base(each[name], rank=3, scale=2.0)
            adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
            adapter.unfreeze_adapter()
    indices, x, dy = mx.random.randint(0, 5, (40, 2)), mx.random.normal((40, 32)), mx.random.normal((40, 2, 32))
    ours, theirs = Called(layer, indices), Called(wanted_layer, indices)
    with patched():
        for training in (True, False):
            wanted, found = (value_and_gradients(each.train(training), each, x, dy) for each in (theirs, ours))
            assert found.keys() == wanted.keys()
            for name, array in wanted.items():
                assert mx.abs(found[name] - array).max() <= 1e-5 * mx.abs(array).max(), name
    # Upstream's code evaluates where MLX has the product.
    assert len(served) == (1 if kind != "global_scale" else 3 if backend.device() == "cpu" else 2)


def test_mlx_lms_own_adapter_is_served(served, tiny_model):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_model("qwen3_5_moe")
    model.freeze()
    keys = {f"mlp.switch_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    compare(blocks(model)[0], served, 64)


def test_conversion_while_the_patches_are_in_force_finds_the_experts(tiny_model):
    with patched():
        report = convert_to_lora(tiny_model("qwen3_5_moe"), LoraConfig(rank=2))
    assert any("switch_mlp.gate_proj" in path for path in report.converted)
    assert all("conv1d" in path for path in report.skipped)
