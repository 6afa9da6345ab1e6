"""Rows with pictures of random patches, for models whose tower deltatune runs: no processor and no file is needed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from deltatune.data.vision.media import MediaSize, Pictures
from deltatune.errors import UserError
from deltatune.models.vision.inputs import Picture, VisionSpec, token_positions, vision_batch
from deltatune.models.vision.split import has_vision, split_vision, vision_arrays, vision_spec


class MadeReader:
    """Stands in for the reader of images: a row gives the patches themselves."""

    def read(self, value: Picture, source: str) -> tuple[Picture, MediaSize]:
        """Return the patches and their size."""
        return value, MediaSize(value.grid)

    def digest(self, value: Picture, source: str) -> bytes:
        """Return a digest; the patches are the same in every run."""
        return bytes(16)


def spec_of(model: nn.Module) -> VisionSpec | None:
    """Return the numbers of a model's tower, or None where it has none that deltatune runs."""
    if not has_vision(model):
        return None
    try:
        return vision_spec(model)
    except UserError:
        return None


def with_picture(tokens: np.ndarray, spec: VisionSpec, drawn: np.random.Generator) -> tuple[np.ndarray, Pictures]:
    """Put a picture of four by six patches behind the first two tokens; return the row and its picture."""
    grid = (1, 2 * spec.merge, 3 * spec.merge)
    picture = Picture(drawn.standard_normal((int(np.prod(grid)), spec.values)).astype(np.float32), grid)
    marks = [spec.start_token, *[spec.image_token] * spec.tokens(grid), spec.end_token]
    row = np.concatenate([tokens[:2], np.array(marks, tokens.dtype), tokens[2:]])
    reader: Any = MadeReader()
    return row, Pictures((picture,), (grid,), (bytes(16),), token_positions(row, [grid], spec), spec, reader)


class PicturedRows:
    """Two rows of `length` tokens beside their pictures, and the two ways to compute their logits."""

    def __init__(self, spec: VisionSpec, length: int) -> None:
        drawn = np.random.default_rng(0)
        rows = [with_picture(drawn.integers(10, 300, length).astype(np.int32), spec, drawn) for _ in range(2)]
        self.tokens = mx.array(np.stack([row for row, _ in rows]))
        self._pictures = [pictures for _, pictures in rows]
        self._batch = vision_batch(
            [(row, pictures.positions, pictures.values) for row, pictures in rows], len(rows[0][0]), spec
        )

    def upstream(self, model: Any) -> mx.array:
        """Return the logits by the model's own forward pass."""
        patches = np.concatenate([picture.patches for pictures in self._pictures for picture in pictures.values])
        grids = [pictures.grids[0] for pictures in self._pictures]
        return model(self.tokens, pixel_values=mx.array(patches), image_grid_thw=mx.array(grids)).logits

    def ours(self, model: Any) -> mx.array:
        """Return the logits by the parts that deltatune trains."""
        split = split_vision(model, compare=False)
        return split.head(split.backbone(self.tokens, vision_arrays(self._batch)))
