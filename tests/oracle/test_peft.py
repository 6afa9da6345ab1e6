"""transformers + PEFT load deltatune's exports, and deltatune loads PEFT's files: the logits are the same. Live."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from deltatune.export.peft_adapter import write_peft
from deltatune.export.peft_import import import_peft
from deltatune.lora import convert_to_lora, load_adapters, save_adapters
from deltatune.models.adapted_base import two_ahead
from deltatune.models.checkpoint_writer import merge_checkpoint
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig
from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import CASES
from deltatune.selftest.parity.ours import write_save

pytestmark = pytest.mark.oracle

FAMILIES = [name for name in CASES if "-" not in name]
EXPERTS = ["qwen3_5_moe", "qwen3_next", "kimi_linear", "bailing_hybrid"]
TOLERANCE = 1e-4
TOKENS = np.arange(3, 3 + 2 * 19).reshape(2, 19) * 7 % seeded.VOCAB


def saved(folder: Path, name: str, **options) -> Path:
    """A family's tiny checkpoint as transformers saves it."""
    from parity import theirs

    case = CASES[name]
    config, shapes = theirs.saved(case.family.model_type, {**case.family.options, **options})
    weights = case.family.weights(shapes)
    theirs.load(config, weights)
    return write_save(folder / "checkpoint", config, weights)


def theirs_loaded(folder: Path):
    from parity import theirs
    from safetensors.numpy import load_file

    return theirs.load(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def their_logits(model) -> np.ndarray:
    import torch

    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.numpy()


def our_logits(model: nn.Module) -> np.ndarray:
    model.eval()
    return np.array(model(mx.array(TOKENS)).astype(mx.float32))


def moved(model: nn.Module, deviation: float = 0.08) -> nn.Module:
    """Move what trains of a model by drawn numbers."""

    def drawn(path: str, value: mx.array) -> mx.array:
        return value + mx.array(seeded.spread(f"export {path}", value.shape, deviation))

    model.update(tree_map_with_path(drawn, model.trainable_parameters()))
    return model


def adapted(folder: Path, adapter: Path, kind: str = "lora", **options) -> np.ndarray:
    """Save a random adapter on the model in `folder`; returns the adapted model's logits."""
    model, _ = load_model(folder)
    settings = {"rank": 3, "scale": 1.5} | options
    report = convert_to_lora(model, LoraConfig(**settings), fine_tune_type=kind)
    assert report.converted
    save_adapters(moved(model), adapter, {"model": str(folder)})
    return our_logits(model)


def check_both_ways(tmp_path: Path, folder: Path, ours: np.ndarray) -> None:
    """PEFT with the export, and deltatune with PEFT's files of that, compute the logits `ours`."""
    import peft

    write_peft(folder, tmp_path / "adapter", tmp_path / "peft", str(folder))
    base = theirs_loaded(folder)
    plain = their_logits(base)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    assert np.abs(plain - ours).max() > 0.05
    assert np.abs(their_logits(model) - ours).max() < TOLERANCE
    model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    import_peft(folder, tmp_path / "saved", tmp_path / "imported")
    back, _ = load_model(folder)
    load_adapters(back, tmp_path / "imported")
    assert np.abs(our_logits(back) - ours).max() < TOLERANCE


def embedded(name: str, tied: bool) -> tuple[str, dict, dict]:
    embedding = "*word_embeddings" if name == "bailing_hybrid" else "*embed_tokens"
    return name, {"keys": [embedding, "*.q_proj"] + ([] if tied else ["*lm_head"])}, {"tie_word_embeddings": tied}


# A family, options of the adapter, and those of the model.
ADAPTERS = {f"every module: {name}": (name, {}, {}) for name in FAMILIES}
# PEFT refuses adapters of Mamba's output projections.
ADAPTERS |= {
    f"every module: {name}": (name, {"exclude": ["*.out_proj"]}, {}) for name in ("nemotron_h", "falcon_h1", "mamba2")
}
# Its model in torch has no generation, which PEFT wants.
del ADAPTERS["every module: bailing_moe_linear"]
ADAPTERS["experts without a gate"] = ("nemotron_h", {"keys": ["*switch_mlp.fc1"]}, {})
ADAPTERS |= {f"dora: {name}": (name, {"kind": "dora", "keys": ["*_proj"]}, {}) for name in ("qwen3_5", "olmo_hybrid")}
ADAPTERS["dora: gemma3"] = ("gemma3", {"kind": "dora", "keys": ["*_proj"]}, {})
ADAPTERS["dora: kimi_linear"] = ("kimi_linear", {"kind": "dora", "keys": ["*_proj"], "exclude": ["*switch_mlp*"]}, {})
ADAPTERS |= {f"rslora: {name}": (name, {"rslora": True, "scale": 2.0}, {}) for name in ("qwen3", "qwen3_5_moe")}
# transformers 5.23 cannot tie the head of bailing_hybrid.
TIED = [("qwen3", False), ("qwen3", True), ("qwen3_5", False), ("qwen3_5", True), ("bailing_hybrid", False)]
ADAPTERS |= {f"embeddings: {name}{', tied' * tied}": embedded(name, tied) for name, tied in TIED}
for matrices in (["gate"], ["up"], ["down"], ["gate", "up"]):
    keys = [f"mlp.switch_mlp.{matrix}_proj" for matrix in matrices]
    ADAPTERS[f"experts: {', '.join(matrices)}"] = ("qwen3_5_moe", {"keys": keys}, {})


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_goes_to_peft_and_back(case, tmp_path):
    name, options, of_model = ADAPTERS[case]
    folder = saved(tmp_path, name, **of_model)
    check_both_ways(tmp_path, folder, adapted(folder, tmp_path / "adapter", **options))


@pytest.mark.parametrize("name", ["beside", "qwen3_next", "nemotron_h"])
def test_the_adapter_of_a_head(name, tmp_path):
    """PEFT puts the model's adapter on a model without its head; on one with a head in torch, the second folder's."""
    import peft
    import torch
    from parity import ahead, ahead_theirs, theirs

    case = ahead.CASES[name]
    config, shapes = ahead_theirs.COMPARISON.layout(case)
    weights = case.model.family.weights(shapes)
    folder = write_save(tmp_path / "checkpoint", config, weights)
    model = ahead.with_head(folder)
    hidden = seeded.spread("hidden", (2, 19, config["hidden_size"]), 1.0)
    plain = two_ahead(model)(mx.array(hidden), mx.array(TOKENS))
    options = LoraConfig(rank=3, scale=1.5, exclude=["*.out_proj"])
    convert_to_lora(model, options, parts=("language", "mtp"))
    save_adapters(moved(model), tmp_path / "adapter", {})
    expected = two_ahead(model)(mx.array(hidden), mx.array(TOKENS))
    assert mx.abs(plain - expected).max() > 0.05
    write_peft(folder, tmp_path / "adapter", tmp_path / "peft", str(folder))
    bare = theirs.load(config, {name: value for name, value in weights.items() if not name.startswith("mtp.")})
    found = their_logits(peft.PeftModel.from_pretrained(bare, tmp_path / "peft"))
    assert np.abs(found - our_logits(model)).max() < TOLERANCE
    both = ahead_theirs.COMPARISON.load(config, weights)
    embedded = both.get_input_embeddings()(torch.from_numpy(TOKENS))
    head = peft.PeftModel.from_pretrained(both, tmp_path / "peft" / "mtp").get_base_model().mtp
    with torch.no_grad():
        drafted = head(torch.from_numpy(hidden), embedded, both.model).numpy()
    assert np.abs(drafted - np.array(expected)).max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_checkpoint(name, tmp_path):
    """`deltatune merge` on a checkpoint as transformers saves it gives one that transformers reads whole."""
    folder = saved(tmp_path, name)
    ours = adapted(folder, tmp_path / "adapter")
    merge_checkpoint(folder, tmp_path / "adapter", tmp_path / "merged")
    assert np.abs(their_logits(theirs_loaded(tmp_path / "merged")) - ours).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["lora", "dora", "experts", "rslora"])
def test_an_adapter_that_peft_made(kind, tmp_path):
    """Adapters made by PEFT itself, by its users' usual options, not by an export of ours."""
    import peft
    import torch

    name = "qwen3_5_moe" if kind == "experts" else "qwen3_5"
    folder = saved(tmp_path, name)
    options = {
        "lora": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"layers.1.*": 3}},
        "dora": {"target_modules": ["q_proj", "in_proj_qkv", "down_proj"], "use_dora": True},
        "experts": {
            "target_modules": ["o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        "rslora": {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True},
    }[kind]
    config = peft.LoraConfig(r=4, lora_alpha=7, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(theirs_loaded(folder), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    expected = their_logits(model)
    model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    import_peft(folder, tmp_path / "saved", tmp_path / "imported")
    ours, _ = load_model(folder)
    plain = our_logits(ours)
    load_adapters(ours, tmp_path / "imported")
    assert np.abs(plain - expected).max() > 0.05
    assert np.abs(our_logits(ours) - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"])
def test_tower_projector_and_language_model(name, tmp_path):
    """Adapters on every module of a model with images: the loss of a batch with images is the same on both sides."""
    import peft
    from parity import vision_theirs

    from deltatune.models.load import load_vision_tower
    from deltatune.selftest.parity.vision import CASES as VISION
    from deltatune.selftest.parity.vision import batch

    case = VISION[name]
    config, shapes = vision_theirs.COMPARISON.layout(case)
    weights = case.weights(shapes)
    model = load_vision_tower(write_save(tmp_path / "mlx", *case.readable(config, weights)))
    convert_to_lora(model, LoraConfig(rank=3, scale=1.5), parts=("language", "vision", "projector"))
    plain = vision_loss(model, batch(0))
    save_adapters(moved(model, 0.12), tmp_path / "adapter", {})
    expected = vision_loss(model, batch(0))
    write_peft(tmp_path / "mlx", tmp_path / "adapter", tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(vision_theirs.COMPARISON.load(config, weights), tmp_path / "peft")
    assert abs(plain - expected) > 1e-2
    assert abs(vision_theirs.loss_of(theirs, batch(0)).item() - expected) < TOLERANCE
    theirs.save_pretrained(tmp_path / "saved")
    import_peft(tmp_path / "mlx", tmp_path / "saved", tmp_path / "imported")
    back = load_vision_tower(tmp_path / "mlx")
    load_adapters(back, tmp_path / "imported")
    assert abs(vision_loss(back, batch(0)) - expected) < TOLERANCE


def vision_loss(model: nn.Module, rows) -> float:
    """Our loss of a batch with images."""
    from deltatune.models.vision.split import split_vision, vision_spec
    from deltatune.options.config import TrainConfig
    from deltatune.patches import patched
    from deltatune.selftest.parity.vision_ours import as_batch
    from deltatune.train.batch_loss import chunked_loss
    from deltatune.train.distributed import World
    from deltatune.train.step import Step
    from deltatune.train.updates.optimizer import build_optimizer

    with patched(model):
        split = split_vision(model)
        step = Step(model, build_optimizer(TrainConfig()), chunked_loss(split.backbone, split.head), World())
        total, weight, *_ = step.micro_batch(as_batch(rows, vision_spec(model)), None)
        mx.eval(total, weight)
    return (total / weight).item()
