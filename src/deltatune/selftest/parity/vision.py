"""Parity on images and videos: the cases, their tiny checkpoints, and the batches that both sides train on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from . import seeded
from .cases import STEPS
from .families import ATTENTION, COMMON, DELTA, ENCLOSED, EXPERTS, Config, Weights

START, END, IMAGE, VIDEO = 3, 4, 5, 6
PATCH, MERGE, SIDE = 4, 2, 6
VALUES = 3 * 2 * PATCH**2

_TOKENS = {"vision_start_token_id": START, "vision_end_token_id": END, "image_token_id": IMAGE, "video_token_id": VIDEO}
_TOWER = {
    "depth": 2,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": SIDE**2,
    "initializer_range": 0.02,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}


@dataclass(frozen=True)
class VisionCase:
    """A model family with a vision tower; `deep` lists the tower's layers that the language model reads (deepstack)."""

    model_type: str
    text: Config
    deep: tuple[int, ...] = ()
    centred_norms: bool = False
    learning_rate: float = 4e-3
    draw: int = 0
    videos: bool = False

    @property
    def options(self) -> Config:
        """Options of the transformers config."""
        vision: Config = _TOWER | {"out_hidden_size": self.text["hidden_size"]}
        if self.deep:
            vision["deepstack_visual_indexes"] = list(self.deep)
        return {
            "text_config": self.text,
            "vision_config": vision,
            "tie_word_embeddings": self.text.get("tie_word_embeddings", False),
            **_TOKENS,
        }

    def weights(self, shapes: dict[str, tuple[int, ...]]) -> Weights:
        """Draw the checkpoint, with the names of a Hugging Face save."""
        stream = f"vision {self.model_type} {self.draw}"
        return {name: self._weight(stream, name, tuple(shape)) for name, shape in shapes.items()}

    def _weight(self, stream: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if ".visual." not in name:
            return seeded.weight(stream, name, shape, 0.5, self.centred_norms)
        key = f"{stream} {name}"
        if len(shape) == 1:
            return seeded.spread(key, shape, 0.1, 0.0 if name.endswith("bias") else 1.0)
        if "pos_embed" in name:
            return seeded.spread(key, shape, 0.5)
        return seeded.spread(key, shape, int(np.prod(shape[1:])) ** -0.5)

    def readable(self, config: Config, weights: Weights) -> tuple[Config, Weights]:
        """Return config.json and tensors as released checkpoints have them: axes of qwen3_vl_moe's experts swapped."""
        if self.model_type != "qwen3_vl_moe":
            return config, weights
        swapped = {name: value.swapaxes(1, 2) for name, value in weights.items() if ".experts." in name}
        return {**config, "text_config": {**config["text_config"], "tie_word_embeddings": False}}, weights | swapped


_TEXT = {**COMMON, **ATTENTION, "num_hidden_layers": 3}
_MIXED = {**COMMON, **ATTENTION, **DELTA, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}

CASES: dict[str, VisionCase] = {
    "qwen3_5": VisionCase("qwen3_5", {**_MIXED, **ENCLOSED}, centred_norms=True, draw=4),
    "qwen3_5_moe": VisionCase("qwen3_5_moe", {**_MIXED, **ENCLOSED, **EXPERTS}, centred_norms=True, draw=5),
    "qwen3_vl": VisionCase("qwen3_vl", {**_TEXT, "rope_parameters": _ROPE}, deep=(0, 1)),
    "qwen3_vl_moe": VisionCase(
        "qwen3_vl_moe", {**_TEXT, **EXPERTS, "rope_parameters": _ROPE}, deep=(0, 1), learning_rate=1.3e-2, draw=14
    ),
    "qwen3_5-video": VisionCase(
        "qwen3_5", {**_MIXED, **ENCLOSED}, centred_norms=True, learning_rate=2.5e-3, draw=4, videos=True
    ),
    "qwen3_5_moe-video": VisionCase(
        "qwen3_5_moe", {**_MIXED, **ENCLOSED, **EXPERTS}, centred_norms=True, learning_rate=2.7e-3, draw=41, videos=True
    ),
    "qwen3_vl-video": VisionCase("qwen3_vl", {**_TEXT, "rope_parameters": _ROPE}, deep=(0, 1), videos=True),
    "qwen3_vl_moe-video": VisionCase(
        "qwen3_vl_moe",
        {**_TEXT, **EXPERTS, "rope_parameters": _ROPE},
        deep=(0, 1),
        learning_rate=1.3e-2,
        draw=14,
        videos=True,
    ),
}


def mlx_path(path: str) -> str:
    """mlx-vlm's path of a transformers module."""
    path = re.sub(r"^model\.visual\.", "vision_tower.", path)
    return re.sub(r"^model\.language_model\.", "language_model.model.", path)


@dataclass(frozen=True)
class VisionRows(seeded.Rows):
    """A batch with the patches of each row's images and videos, and their grids (frames, height, width) in patches.

    More than one frame makes a video.
    """

    patches: tuple[tuple[np.ndarray, ...], ...]
    grids: tuple[tuple[tuple[int, int, int], ...], ...]


# Grids of the images of each row of each batch: rows with none, one and several, wide ones and high ones.
_GRIDS = (
    (((1, 4, 6),), (), ((1, 2, 4), (1, 6, 2))),
    (((1, 6, 6), (1, 4, 4)), ((1, 2, 2),)),
    ((), ((1, 4, 2),), (), ((1, 2, 6), (1, 2, 2))),
)


# Grids with videos: alone, before and after an image, of several lengths, and rows without any.
_VIDEO_GRIDS = (
    (((3, 4, 2),), (), ((1, 2, 4), (2, 4, 4))),
    (((2, 4, 6), (1, 4, 4)), ((4, 2, 2),)),
    ((), ((2, 2, 2),), ((1, 4, 2),), ((2, 2, 4), (3, 2, 2))),
)


@cache
def batch(step: int, videos: bool = False) -> VisionRows:
    """seeded.batch with images inserted among the tokens of each row; the loss does not count their tokens."""
    table = _VIDEO_GRIDS if videos else _GRIDS
    rows, grids = seeded.batch(step), table[step % len(table)]
    draw = seeded.generator(f"videos {step}" if videos else f"images {step}")
    tokens, counts, lengths, patches = [], [], [], []
    for row, size in enumerate(rows.lengths):
        words: list[int]
        counted: list[float]
        words, counted = rows.tokens[row, :size].tolist(), [0.0, *rows.counts[row, : size - 1].tolist()]
        pictures, at = [], 1
        for index, grid in enumerate(grids[row]):
            count = int(np.prod(grid))
            pictures.append(((draw.random((count, VALUES)) - 0.5) * 3).astype(np.float32))
            block = _block(grid, draw)
            # A video's block may be longer than the fixed distance between images.
            at = at if videos else 1 + 12 * index
            words[at:at], counted[at:at] = block, [0.0] * len(block)
            at += len(block) + 6
        tokens.append(words)
        counts.append(counted)
        lengths.append(len(words))
        patches.append(tuple(pictures))
    width = max(lengths)
    padded = np.full((len(tokens), width), seeded.PAD, np.int32)
    weights = np.zeros((len(tokens), width), np.float32)
    for row, words in enumerate(tokens):
        padded[row, : len(words)], weights[row, : len(words)] = words, counts[row]
    return VisionRows(padded, weights[:, 1:], tuple(lengths), tuple(patches), grids)


def _block(grid: tuple[int, int, int], draw: np.random.Generator) -> list[int]:
    """The tokens of an image, or of a video: its frames one after another, each after two tokens of time."""
    frames, height, width = grid
    size = height * width // MERGE**2
    if frames == 1:
        return [START, *([IMAGE] * size), END]
    times = [[7 + int(draw.random() * 200) for _ in range(2)] for _ in range(frames)]
    return [token for time in times for token in (*time, START, *([VIDEO] * size), END)]


def checksums(weights: Weights, videos: bool = False) -> dict[str, str]:
    """Checksums of the start that both sides share: the checkpoint, and the batches with their images and videos."""
    tensors: dict[str, Any] = {}
    for step in range(STEPS):
        rows = batch(step, videos)
        tensors |= {f"{step}.tokens": rows.tokens, f"{step}.counts": rows.counts}
        for row, pictures in enumerate(rows.patches):
            tensors |= {f"{step}.{row}.{index}": picture for index, picture in enumerate(pictures)}
    return {"checkpoint": seeded.checksum(weights), "batches": seeded.checksum(tensors)}
