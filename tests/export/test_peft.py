"""An adapter goes to PEFT's format and comes back as it was; updates that one side cannot express are refused by name.

tests/oracle/test_peft.py compares logits with PEFT itself, live.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from checkpoint_copies import copied
from deltatune.cli import main
from deltatune.export.peft_adapter import PEFT_CONFIG, PEFT_WEIGHTS, from_peft
from deltatune.lora import load_adapters
from deltatune.models.load import load_model
from families import FAMILIES
from saved_adapters import adapted
from transformers_saves import recorded_save

TOKENS = mx.array([[5, 6, 7, 8, 9]])
RANK, SCALE = 3, 1.5


def adapt(base: Path, adapter: Path, kind: str = "lora", **options) -> mx.array:
    """Save a random adapter for the model in `base`, and return the adapted model's logits."""
    return adapted(base, adapter, kind, **({"rank": RANK, "scale": SCALE} | options))(TOKENS)


def logits(base: Path, adapter: Path) -> mx.array:
    model, _ = load_model(base)
    load_adapters(model, adapter)
    return model(TOKENS)


def exported(base: Path, folder: Path, *words: str) -> tuple[dict, dict[str, mx.array]]:
    """Export the adapter in folder/adapter; returns PEFT's config and tensors."""
    command = ["export", "--to", "peft", "--model", str(base), "--adapter-path", str(folder / "adapter")]
    assert main([*command, "--save-path", str(folder / "peft"), *words]) == 0
    tensors = mx.load(str(folder / "peft" / PEFT_WEIGHTS))
    mx.eval(tensors)  # Tests write the file anew.
    return json.loads((folder / "peft" / PEFT_CONFIG).read_text()), tensors


def imported(base: Path, folder: Path) -> int:
    return main(["import", "--model", str(base), "--peft", str(folder / "peft"), "--save-path", str(folder / "back")])


@pytest.fixture(scope="module")
def made_once(tiny_checkpoint, tmp_path_factory):
    """(base, folder with an adapter and its export) of one module."""
    base, folder = tiny_checkpoint("qwen3_5"), tmp_path_factory.mktemp("export")
    adapt(base, folder / "adapter", keys=["*.o_proj"])
    exported(base, folder)
    return base, folder


@pytest.fixture
def small_export(made_once, tmp_path):
    """A copy of the folder of `made_once`, to change."""
    base, folder = made_once
    return base, shutil.copytree(folder, tmp_path / "export")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "kimi_linear", "nemotron_h", "granitemoehybrid"])
def test_every_module_goes_to_peft_and_back(family, tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint(family) if family in FAMILIES else recorded_save(family, tmp_path / "base")
    ours = adapt(base, tmp_path / "adapter")
    config, tensors = exported(base, tmp_path)
    assert ("PEFT refuses this adapter" in capsys.readouterr().out) == (family == "nemotron_h")
    assert imported(base, tmp_path) == 0
    before, after = (mx.load(str(tmp_path / name / "adapters.safetensors")) for name in ("adapter", "back"))
    assert before.keys() == after.keys()
    assert all(mx.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert mx.abs(logits(base, tmp_path / "back") - ours).max().item() < 1e-5
    assert config["lora_alpha"] / config["r"] == SCALE
    modules = config["target_modules"] + [name.rpartition(".")[0] for name in config.get("target_parameters", [])]
    for name, tensor in tensors.items():
        assert tensor.dtype == mx.float32
        assert name.startswith("base_model.model.")
        path = name.rpartition(".lora_")[0].removesuffix(".base_layer")
        assert any(path.endswith(f".{module}") for module in modules)


def test_experts_are_parameters_of_twice_the_rank(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("qwen3_5_moe")
    adapt(base, tmp_path / "adapter", keys=["mlp.switch_mlp.*"], layers=[1])
    config, tensors = exported(base, tmp_path)
    layer = "layers.1.mlp.experts"
    assert config["target_modules"] == []
    assert sorted(config["target_parameters"]) == [f"{layer}.down_proj", f"{layer}.gate_up_proj"]
    root = f"base_model.model.model.language_model.{layer}"
    experts, hidden, inner = 8, 64, 64
    shapes = {name.removeprefix(root): tensor.shape for name, tensor in tensors.items()}
    ranks = {"down_proj": RANK, "gate_up_proj": 2 * RANK}
    assert shapes == {
        ".lora_A.weight": (experts * RANK, inner),
        ".lora_B.weight": (hidden, RANK * experts),
        ".base_layer.lora_A.weight": (experts * 2 * RANK, hidden),
        ".base_layer.lora_B.weight": (2 * inner, 2 * RANK * experts),
    }
    found = {name: config["rank_pattern"].get(f"experts.{name}", config["r"]) for name in ranks}
    alphas = {name: config["alpha_pattern"].get(f"experts.{name}", config["lora_alpha"]) for name in ranks}
    assert found == ranks
    assert alphas == {name: rank * SCALE for name, rank in ranks.items()}


def test_router_and_shared_experts_are_parameters_where_peft_takes_them_for_experts(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("qwen3_next")
    adapt(base, tmp_path / "adapter", keys=["mlp.gate", "mlp.shared_expert.*", "*.o_proj"], dropout=0.1)
    config, tensors = exported(base, tmp_path)
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {"o_proj"}
    ends = {name.split(".mlp.")[1] for name in config["target_parameters"]}
    assert ends == {"gate.weight", *(f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))}
    assert "base_model.model.model.layers.0.mlp.shared_expert.up_proj.lora_A.weight" in tensors
    assert config["lora_dropout"] == 0


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_quantised_base_and_base_model(kind, tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint("qwen3_5", quantize={})
    ours = adapt(base, tmp_path / "adapter", kind, keys=["*.q_proj", "*.down_proj"])
    config, tensors = exported(base, tmp_path, "--base-model", "Qwen/Qwen3.5-0.8B")
    assert config["base_model_name_or_path"] == "Qwen/Qwen3.5-0.8B"
    assert "for Qwen/Qwen3.5-0.8B" in capsys.readouterr().out
    assert config["use_dora"] == (kind == "dora") == any(name.endswith("magnitude_vector") for name in tensors)
    assert imported(base, tmp_path) == 0
    assert mx.abs(logits(base, tmp_path / "back") - ours).max().item() < 1e-5


def test_the_update_of_a_tied_head_is_stored_for_both(tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint("qwen3_5")
    ours = adapt(base, tmp_path / "adapter", keys=["*embed_tokens"])
    config, tensors = exported(base, tmp_path)
    assert config["target_modules"] == ["embed_tokens", "lm_head"]
    root = "base_model.model.model.language_model.embed_tokens.lora_embedding"
    assert mx.array_equal(tensors[f"{root}_A"].T, tensors["base_model.model.lm_head.lora_B.weight"])
    assert "merge_and_unload" in capsys.readouterr().out
    assert imported(base, tmp_path) == 0
    assert mx.abs(logits(base, tmp_path / "back") - ours).max().item() < 1e-5
    tensors["base_model.model.lm_head.lora_B.weight"] = 2 * tensors["base_model.model.lm_head.lora_B.weight"]
    mx.save_safetensors(str(tmp_path / "peft" / PEFT_WEIGHTS), tensors)
    assert imported(base, tmp_path) == 2
    assert "head is tied" in capsys.readouterr().err


def test_modules_for_single_experts_are_joined(tiny_checkpoint, tmp_path):
    """As PEFT saved them on transformers 4: a Linear for each matrix of each expert, here of two experts only."""
    base = tiny_checkpoint("qwen3_5_moe")
    adapt(base, tmp_path / "adapter", keys=["*.o_proj"])
    config, tensors = exported(base, tmp_path)
    root, a, b = "base_model.model.model.layers.1.mlp.experts", mx.random.normal((4, 64)), mx.random.normal((64, 4))
    for expert, rank in ((2, 4), (5, 3)):
        tensors[f"{root}.{expert}.up_proj.lora_A.weight"] = a[:rank]
        tensors[f"{root}.{expert}.up_proj.lora_B.weight"] = b[:, :rank]
    mx.save_safetensors(str(tmp_path / "peft" / PEFT_WEIGHTS), tensors)
    assert imported(base, tmp_path) == 0
    found = mx.load(str(tmp_path / "back" / "adapters.safetensors"))
    saved = json.loads((tmp_path / "back" / "adapter_config.json").read_text())["lora_parameters"]
    path = "language_model.model.layers.1.mlp.switch_mlp.up_proj"
    update = saved["scale"] * found[f"{path}.lora_b"] @ found[f"{path}.lora_a"]
    alpha = config["lora_alpha"]
    assert mx.allclose(update[2], alpha / 4 * b @ a, atol=1e-4)
    assert mx.allclose(update[5], alpha / 3 * b[:, :3] @ a[:3], atol=1e-4)
    assert mx.abs(update).sum(axis=(1, 2)).tolist().count(0) == 6


@pytest.mark.bad_input("import: adapter_config.json with {change}")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "LOHA"}, "only LORA can be imported"),
        ({"peft_type": None, "peft": 1}, "peft_type None"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"trainable_token_indices": 5}, "trainable_token_indices: expected a list of whole numbers"),
        ({"alpha_pattern": {"q_proj(": 3}}, "alpha_pattern: 'q_proj(' is no regular expression"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model too"),
    ],
)
def test_adapter_that_mlx_cannot_express_is_refused(change, said, small_export, capsys):
    base, folder = small_export
    path = folder / "peft" / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert imported(base, folder) == 2
    assert said in capsys.readouterr().err


def test_an_alpha_that_is_null_is_pefts_own(small_export):
    base, folder = small_export
    path = folder / "peft" / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": None, "alpha_pattern": {}}))
    assert imported(base, folder) == 0
    saved = json.loads((folder / "back" / "adapter_config.json").read_text())["lora_parameters"]
    assert saved["scale"] == 8 / saved["rank"]


@pytest.mark.bad_input("import: a PEFT adapter of another model, of another kind, in pickle, or none")
def test_tensors_without_a_place_are_refused(small_export, capsys):
    base, folder = small_export
    weights = folder / "peft" / PEFT_WEIGHTS
    tensors = mx.load(str(weights))
    mx.eval(tensors)
    name = "base_model.model.model.language_model.layers.3.self_attn.o_proj.lora_A.weight"
    for changed, said in (
        ({name: mx.zeros((RANK, 5))}, "the lora_a of language_model.model.layers.3.self_attn.o_proj has shape (5, 3)"),
        ({name.replace("lora_A", "lora_C"): mx.zeros(3)}, "no tensor of LoRA or DoRA"),
        ({name.replace("o_proj", "x_proj"): mx.zeros((3, 5))}, "it has only A"),
        (
            {name.replace("o_proj", "x_proj").replace("_A", part): mx.zeros((3, 3)) for part in ("_A", "_B")},
            "no place for base_model.model.model.language_model.layers.3.self_attn.x_proj",
        ),
    ):
        mx.save_safetensors(str(weights), tensors | changed)
        assert imported(base, folder) == 2
        assert said in capsys.readouterr().err
    weights.unlink()
    (folder / "peft" / "adapter_model.bin").touch()
    assert imported(base, folder) == 2
    assert "can run code" in capsys.readouterr().err
    (folder / "peft" / PEFT_CONFIG).unlink()
    assert imported(base, folder) == 2
    assert "expected a folder that PEFT wrote" in capsys.readouterr().err


@pytest.mark.bad_input("--to peft: {kind} on {options} of {family}")
@pytest.mark.parametrize(
    ("family", "kind", "options", "said"),
    [
        ("qwen3_5", "dora", {"keys": ["*embed_tokens"]}, "scales the columns of an embedding"),
        ("qwen3_next", "dora", {"keys": ["mlp.shared_expert.up_proj"]}, "for which it has no DoRA"),
        ("qwen3_5", "full", {}, "trained without adapters"),
    ],
)
def test_adapter_that_peft_cannot_express_is_refused(family, kind, options, said, tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint(family)
    adapt(base, tmp_path / "adapter", kind, **options)
    words = ["export", "--to", "peft", "--model", str(base), "--adapter-path", str(tmp_path / "adapter")]
    assert main([*words, "--save-path", str(tmp_path / "peft")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "peft").exists()


@pytest.mark.bad_input("export: a folder that holds an adapter, a flag without use, a wrong repository name")
def test_an_export_is_not_overwritten_and_flags_without_use_are_refused(small_export, capsys):
    base, folder = small_export
    words = ["export", "--model", str(base), "--adapter-path", str(folder / "adapter"), "--save-path"]
    for more, said in (
        ([str(folder / "peft"), "--to", "peft"], "holds an adapter already"),
        ([str(folder / "peft"), "--to", "mlx"], "holds an adapter already"),
        ([str(folder / "x"), "--to", "peft", "--outtype", "f16"], "--outtype: --to peft has no use for it"),
        ([str(folder / "x"), "--to", "gguf", "--push-to-hub", "me/it"], "--push-to-hub: --to gguf has no use for it"),
        ([str(folder / "x"), "--to", "peft", "--push-to-hub", "me"], "expected owner/name"),
        ([str(folder / "x"), "--to", "peft", "--push-to-hub", "me/it/so"], "--push-to-hub me/it/so"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (folder / "x").exists()


def early(a, b):
    """Factors of our layout in the form of PEFT before 0.20, which takes [E, out, in] for (E, in, out)."""
    return b.swapaxes(1, 2).reshape(-1, b.shape[1]), a.transpose(2, 1, 0).reshape(a.shape[2], -1)


@pytest.mark.parametrize(("version", "inner"), [("0.18.0", 48), ("0.19.1", 32), ("0.20.0", 32), (None, 32), (None, 48)])
def test_experts_of_each_version_of_peft(tiny_checkpoint, tmp_path, version, inner):
    """With 32 the two sizes of gate_up_proj are equal, and the version alone says which is which."""
    base = tiny_checkpoint("qwen3_5_moe", moe_intermediate_size=inner)
    ours = adapt(base, tmp_path / "adapter", keys=["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"])
    config, tensors = exported(base, tmp_path)
    assert config["peft_version"] == "0.20.0"
    if version in ("0.18.0", "0.19.1"):
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            other = name.replace("lora_A", "lora_B")
            factors = early(*from_peft(tensors[name], tensors[other], 8))
            tensors[name], tensors[other] = map(mx.contiguous, factors)
        mx.eval(tensors)
        mx.save_safetensors(str(tmp_path / "peft" / PEFT_WEIGHTS), tensors)
    config.pop("peft_version")
    config |= {} if version is None else {"peft_version": version}
    (tmp_path / "peft" / PEFT_CONFIG).write_text(json.dumps(config))
    assert imported(base, tmp_path) == 0
    assert mx.abs(logits(base, tmp_path / "back") - ours).max().item() < 1e-5


@pytest.mark.bad_input("import: peft_version that is no version, where it matters")
def test_a_version_of_peft_that_is_none(tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint("qwen3_5_moe", moe_intermediate_size=32)
    adapt(base, tmp_path / "adapter", keys=["mlp.switch_mlp.up_proj"])
    config, _ = exported(base, tmp_path)
    (tmp_path / "peft" / PEFT_CONFIG).write_text(json.dumps(config | {"peft_version": "newest"}))
    assert imported(base, tmp_path) == 2
    assert "peft_version 'newest' is no version" in capsys.readouterr().err


def test_the_class_with_the_adapters_names_is_named(tiny_checkpoint, tmp_path, capsys):
    """Without a task, PEFT's Auto classes take the class of auto_mapping, which has the names of the tensors."""
    base = copied(tiny_checkpoint("qwen3_5"), tmp_path / "base", architectures=["Qwen3_5ForConditionalGeneration"])
    adapt(base, tmp_path / "adapter")
    written, tensors = exported(base, tmp_path)
    assert written["task_type"] is None
    library = "transformers.models.qwen3_5.modeling_qwen3_5"
    assert written["auto_mapping"] == {
        "base_model_class": "Qwen3_5ForConditionalGeneration",
        "parent_library": library,
    }
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in tensors)
    said = "load it with peft.AutoPeftModelForCausalLM, or with PeftModel on a model of AutoModelForImageTextToText"
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "peft" / "README.md").read_text()


def test_whole_embeddings_that_are_the_bases_own_are_no_obstacle(tiny_checkpoint, tmp_path, capsys):
    """PEFT saves the table beside its update: save_embedding_layers is "auto", and embed_tokens a target."""
    base = tiny_checkpoint("qwen3_5")
    ours = adapt(base, tmp_path / "adapter", keys=["*.embed_tokens", "self_attn.q_proj"])
    _, tensors = exported(base, tmp_path)
    table = load_model(base)[0].language_model.model.embed_tokens.weight
    name = next(name for name in tensors if name.endswith("embed_tokens.lora_embedding_A"))
    names = [name.replace("lora_embedding_A", "base_layer.weight"), "base_model.model.lm_head.base_layer.weight"]
    for tables, code, said in (
        ([table, table], 0, "The adapter is in"),
        ([table, table + 1], 2, "the old rows of base_model.model.lm_head.base_layer.weight are not the model's"),
        ([mx.concatenate([table, table[:1]]), table], 2, "has 321 rows, and the model's table 320"),
    ):
        more = dict(zip(names, tables, strict=True))
        mx.save_safetensors(str(tmp_path / "peft" / PEFT_WEIGHTS), tensors | more)
        assert imported(base, tmp_path) == code
        captured = capsys.readouterr()
        assert said in captured.out + captured.err
    assert mx.abs(logits(base, tmp_path / "back") - ours).max().item() < 1e-5
