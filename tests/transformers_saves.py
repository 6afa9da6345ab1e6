"""Tiny checkpoints in the form in which transformers saves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from deltatune.models.load import read_config
from deltatune.models.transformers_configs import completed
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import CASES
from deltatune.selftest.parity.ours import write_save

_CENTRED = ("layernorm.weight", "language_model.norm.weight", "_norm.weight")


def transformers_names(tensors: dict[str, mx.array], *, single_experts: bool = False) -> dict[str, mx.array]:
    """Return the tensors of a tiny qwen3_5_moe, with or without its vision tower, as transformers stores them.

    Norms are stored without the one that is added to them, gate and up together or, with `single_experts`, each matrix
    of each expert by itself.
    """
    stored: dict[str, mx.array] = {}
    for name, value in tensors.items():
        new = name.replace("language_model.model.", "model.language_model.").replace("vision_tower.", "model.visual.")
        new = new.replace("language_model.lm_head.", "lm_head.")
        if new.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        if new.endswith("patch_embed.proj.weight"):
            value = value.transpose(0, 4, 1, 2, 3)
        if value.ndim == 1 and new.endswith(_CENTRED) and "visual" not in new:
            value = value - 1.0
        if ".switch_mlp." in new and single_experts:
            stored |= {new.replace("switch_mlp", f"experts.{e}"): value[e] for e in range(value.shape[0])}
        elif ".switch_mlp.gate_proj" in new:
            both = mx.concatenate([value, tensors[name.replace("gate_proj", "up_proj")]], axis=1)
            stored[new.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = both
        elif ".switch_mlp.up_proj" not in new:
            stored[new.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = value
    return stored


def write_as_transformers(source: Path, target: Path, *, mtp: bool = True, single_experts: bool = True) -> Path:
    """Copy a tiny checkpoint to `target` in transformers' form; with `mtp`, beside a layer that no loader reads."""
    shutil.copytree(source, target)
    tensors = transformers_names(mx.load(str(source / "model.safetensors")), single_experts=single_experts)
    if mtp:
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = mx.random.normal((8, 8)).astype(mx.bfloat16)
    mx.eval(tensors)
    mx.save_safetensors(str(target / "model.safetensors"), tensors, metadata={"format": "pt"})
    return target


def write_as_text_alone(source: Path, target: Path) -> Path:
    """Copy a tiny text checkpoint as transformers 5 saves the language model without its vision tower.

    The options stand at the top level, under a model_type of their own.
    """
    write_as_transformers(source, target, mtp=False)
    tensors = mx.load(str(target / "model.safetensors"))
    renamed = {name.replace("model.language_model.", "model."): value for name, value in tensors.items()}
    mx.eval(renamed)
    mx.save_safetensors(str(target / "model.safetensors"), renamed, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    interval = text.pop("full_attention_interval")
    kinds = [
        "linear_attention" if place % interval else "full_attention"
        for place in range(1, 1 + text["num_hidden_layers"])
    ]
    rope = {"rope_type": "default"} | {key: value for key, value in text["rope_parameters"].items() if key != "type"}
    text |= {"model_type": f"{config['model_type']}_text", "layer_types": kinds, "rope_parameters": rope}
    (target / "config.json").write_text(json.dumps(text))
    return target


def recorded_save(family: str, folder: Path, **options: Any) -> Path:
    """Write the checkpoint of a recorded family as Hugging Face has it, without a tokenizer.

    Its config has these other options, and all that mlx-lm needs to read it alone.
    """
    recorded = recording.read(family)
    weights = recorded.weights(CASES[family])
    write_save(folder, recorded.config | options, weights)
    (folder / "config.json").write_text(json.dumps(completed(read_config(folder))))
    return folder
