"""From the options of a run to a model that is ready to train."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..config import TrainConfig
from ..data.reader import Eyes
from ..lora import convert_to_lora, load_adapter_weights, load_adapters
from ..lora.select import layer_paths
from ..lora.whole_layers import adapts_experts, whole_layers
from ..models.load import Loaded, load
from ..models.vision.split import has_vision, vision_spec


def eyes(loaded: Loaded) -> Eyes | None:
    """What reading images takes, of a model that was loaded to look at some."""
    if loaded.processor is None:
        return None
    videos = getattr(loaded.processor, "video_processor", None)
    return Eyes(loaded.processor.image_processor, vision_spec(loaded.model), videos)


def prepare(model: nn.Module, config: TrainConfig) -> list[str]:
    """Make the part of `model` trainable that `config` asks for, in place; returns what a person should know of it.

    The random state is set from `config.seed` first, so that adapters start the same on every rank.
    """
    mx.random.seed(config.seed)
    layers = config.num_layers
    if layers == TrainConfig.num_layers and len(layer_paths(model)) < layers:
        layers = -1
    report = convert_to_lora(
        model,
        config.lora_parameters,
        fine_tune_type=config.fine_tune_type,
        num_layers=layers,
        parts=[part.strip() for part in config.parts.split(",") if part.strip()],
    )
    if config.from_scratch:
        _unfreeze_beside_layers(model)
    if config.resume_adapter_file is not None:
        load_adapter_weights(model, config.resume_adapter_file)
    said = report.summary()
    if has_vision(model) and adapts_experts(model) and whole_layers(model) is None:
        said.append(
            "mlx-vlm 0.7.10 loads adapters on experts only where all of the last layers' modules have one, and nothing "
            "else: it will not load this adapter. deltatune does; merge it for mlx-vlm."
        )
    return said


def _unfreeze_beside_layers(model: nn.Module) -> None:
    """Embeddings, norms and heads: what full fine-tuning leaves as the checkpoint has it, and scratch cannot."""
    inside = tuple(layer_paths(model))
    for path, module in model.named_modules():
        if path not in inside and not path.startswith(tuple(f"{layer}." for layer in inside)):
            module.unfreeze(recurse=False)


def load_with_adapter(
    model: str | Path, adapter_path: str | None, trust_remote_code: bool, image: str | None = None
) -> Loaded:
    """The model of a folder or of the hub, with the adapter of `adapter_path` where one is given."""
    loaded = load(model, trust_remote_code=trust_remote_code, image=image)
    if adapter_path:
        load_adapters(loaded.model, adapter_path)
        loaded.model.eval()
    return loaded
