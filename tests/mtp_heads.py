"""Gives tiny checkpoints multi-token-prediction heads, as released ones have them."""

import importlib
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from deltatune.models.adapted_base import reader_of
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.families import Family
from deltatune.selftest.parity.ours import write_save
from families import with_noise
from transformers_saves import recorded_save, transformers_names


def with_head(source: Path, target: Path, *, seed: int = 3) -> Path:
    """Copy a tiny checkpoint with MLX's or transformers' names to `target`, with the tensors of a random head."""
    shutil.copytree(source, target)
    add_head(target, seed)
    return target


def headed_save(family: str, target: Path, tokenizer: Path) -> Path:
    """Write the recorded checkpoint of a family as Hugging Face has it, with a random head, and a tokenizer's files."""
    target.mkdir()
    if family == "glm_moe_dsa":
        recorded = recording.read("ahead/glm_moe_dsa")
        write_save(target, recorded.config, Family(family, {}).weights(recorded.shapes))
    else:
        recorded_save(family, target, **({"num_nextn_predict_layers": 1} if family == "nemotron_h" else {}))
        add_head(target, seed=3)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, target)
    return target


def add_head(folder: Path, seed: int) -> None:
    reader, config = reader_of(folder)
    package = importlib.import_module(f"mlx_vlm.speculative.drafters.{reader.output_model_type}")
    text = reader.read_text_config(config)
    mx.random.seed(seed)
    options = {"model_type": reader.output_model_type, "text_config": text}
    head = with_noise(package.Model(package.ModelConfig.from_dict(options)))
    file = folder / "model.safetensors"
    tensors, metadata = mx.load(str(file), return_metadata=True)
    of_head = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    if metadata["format"] != "mlx":
        of_head = _stored(of_head, config["model_type"])
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors | of_head, metadata)


def _stored(of_head: dict[str, mx.array], family: str) -> dict[str, mx.array]:
    """Return the tensors of a head as released checkpoints have them; Qwen's norms are stored without their 1."""
    centred = int(family.startswith("qwen"))
    norms = {name: array - centred for name, array in of_head.items() if array.ndim == 1}
    if family == "nemotron_h":
        for number, name in enumerate(("up_proj", "down_proj"), 1):
            of_head = {key.replace(f"switch_mlp.fc{number}", f"switch_mlp.{name}"): of_head[key] for key in of_head}
    matrices = {name: array for name, array in of_head.items() if array.ndim > 1}
    return norms | transformers_names(matrices, single_experts=not family.startswith("qwen3_5"))
