"""The parts that the checks share: families, a loss of text or of images, gradients and how far apart two are."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import model_gradients
from deltatune.models.vision.split import _example, vision_spec
from deltatune.patches import PATCHES, patch
from model_gradients import relative_errors, rounding_bound

TEXT = ("qwen3_5", "qwen3_5_moe")
VISION = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
MOE = ("qwen3_5_moe", "qwen3_vl_moe")
DELTA = ("qwen3_5", "qwen3_5_moe")


# It takes the chosen experts out of the graph, where upstream leaves them in it and MLX refuses.
ROUTERS = tuple(record for record in PATCHES if record.name == "argpartition")


@contextmanager
def experts_cut_off() -> Iterator[None]:
    """Upstream within the context is patched by ROUTERS alone."""
    patch.apply(ROUTERS)
    try:
        yield
    finally:
        patch.revert()


def tokens(length: int, seed: int = 0) -> mx.array:
    """[2, length], without image tokens."""
    return mx.random.randint(7, 320, (2, length), key=mx.random.key(seed))


def images(model: Any) -> tuple[mx.array, dict[str, mx.array]]:
    """A row [1, T] with four images of unequal shapes, and the other arguments of upstream's call."""
    row, pictures = _example(vision_spec(model))
    grids = [picture.grid for picture in pictures]
    pixels = np.concatenate([picture.patches for picture in pictures])
    return mx.array(row[None]), {"pixel_values": mx.array(pixels), "image_grid_thw": mx.array(grids)}


def logits(model: nn.Module, rows: mx.array, **more: Any) -> mx.array:
    """Upstream's own; mlx-vlm keeps positions of the last call, which no call here may inherit."""
    if "language_model" in model and "vision_tower" in model:
        model.language_model._position_ids = model.language_model._rope_deltas = None
    output = model(rows, **more)
    return output if isinstance(output, mx.array) else output.logits


def loss(model: nn.Module, rows: mx.array, **more: Any) -> mx.array:
    """Sum over all positions of the cross-entropy of the next token."""
    predicted = logits(model, rows, **more)[:, :-1].astype(mx.float32)
    return nn.losses.cross_entropy(predicted, rows[:, 1:]).sum()


def gradients(model: nn.Module, rows: mx.array, **more: Any) -> tuple[float, dict[str, mx.array]]:
    """The loss and the gradient of every parameter."""
    return model_gradients.gradients(model, partial(loss, **more), rows)


def error(expected: dict[str, mx.array], actual: dict[str, mx.array]) -> float:
    """Size of the difference of two gradients over the size of the first."""
    assert all(mx.all(mx.isfinite(array)).item() for array in actual.values())
    return relative_errors(expected, actual)[0]


def bound(model: nn.Module, expected: dict[str, mx.array], rows: mx.array, **more: Any) -> float:
    """The largest error() between two gradients of the model that round differently; `expected` is one of them."""
    return rounding_bound(model, lambda: gradients(model, rows, **more)[1], expected)
