"""Tiny vision-language checkpoints of every family, written without a download, for fixtures of tests/conftest.py."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from deltatune.models.load import build_vision
from deltatune.models.transformers_configs import completed
from deltatune.models.vision.inputs import Grid, Picture, VisionSpec, single_frames, token_positions
from families import PARTS, with_noise

VISION_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TOKENS = [START, END, IMAGE, VIDEO]
# After the three special tokens of tests/conftest.py.
IDS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PATCH, MERGE = 8, 2


def vision_config(family: str, text: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny `family`; `text` is tests/conftest.py's text_config where that has one."""
    if family == "qwen3_vl":
        text = {"model_type": "qwen3_vl_text"} | PARTS["qwen3_vl"]
    elif family == "qwen3_vl_moe":
        text = {"model_type": "qwen3_vl_moe_text"} | PARTS["qwen3_vl"] | PARTS["qwen3_vl_experts"]
    vision = {"model_type": family} | PARTS["tower"]
    vision["deepstack_visual_indexes"] = [0, 1] if "vl" in family else []
    text = copy.deepcopy(text) | overrides
    return {
        "model_type": family,
        "text_config": text,
        "vision_config": vision,
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        **IDS,
    }


def build_vision_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """mlx-vlm's model with random weights."""
    mx.random.seed(seed)
    return with_noise(build_vision(completed(config)))


def write_processor(folder: Path, **size: int) -> None:
    """preprocessor_config.json; `size`: shortest_edge, longest_edge, in pixels."""
    content = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": 256, "longest_edge": 4096} | size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(content, indent=2))


def save_weights(folder: Path, model: nn.Module) -> None:
    tensors: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})


def pictured_row(draw: np.random.Generator, spec: VisionSpec, grids: Sequence[Grid], *, video: bool = False) -> Any:
    """A row of random text with images or videos of these grids, as (tokens [N], positions [3, N], pictures).

    A video has text before each frame.
    """
    tokens, pictures = draw.integers(7, 300, 5).tolist(), []
    for grid in grids:
        patches = np.random.default_rng(list(grid)).standard_normal((int(np.prod(grid)), spec.values))
        pictures.append(Picture(patches.astype(np.float32), grid))
        for frame in single_frames([grid]) if video else [grid]:
            text = draw.integers(7, 300, 3).tolist()
            token = spec.video_token if video else spec.image_token
            tokens += [*text, spec.start_token, *[token] * spec.tokens(frame), spec.end_token]
    tokens = np.array([*tokens, *draw.integers(7, 300, 3)], np.int32)
    return tokens, token_positions(tokens, single_frames(grids) if video else grids, spec), pictures
