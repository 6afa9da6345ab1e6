"""Gives tiny checkpoints of Qwen3.5 a multi-token-prediction head, as released ones have it."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.qwen3_5_mtp import Model, ModelConfig

from deltatune.models.transformers_configs import completed
from families import with_noise
from transformers_saves import transformers_names


def with_head(source: Path, target: Path, *, seed: int = 3) -> Path:
    """Copy a tiny checkpoint with MLX's or transformers' names to `target`, with the tensors of a random head."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    mx.random.seed(seed)
    head = with_noise(Model(ModelConfig.from_dict(completed(config))))
    file = target / "model.safetensors"
    tensors, metadata = mx.load(str(file), return_metadata=True)
    of_head = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    if metadata["format"] != "mlx":
        matrices = {name: array for name, array in of_head.items() if array.ndim > 1}
        norms = {name: array - 1 for name, array in of_head.items() if array.ndim == 1}
        of_head = transformers_names(matrices) | norms
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors | of_head, metadata)
    return target
