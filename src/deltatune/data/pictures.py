"""The images of one example, read again whenever a batch needs them, and what their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..models.vision_inputs import Grid, VisionBatch, VisionSpec, vision_batch
from .images import ImageReader


@dataclass(frozen=True, eq=False)
class Pictures:
    """values: what the row gave for each image, in the order of the tokens; grids, and digests to tell them apart.

    positions: int32 [3, N], for each of the example's tokens. A row of text for a model with eyes has no values.
    """

    values: tuple[Any, ...]
    grids: tuple[Grid, ...]
    digests: tuple[bytes, ...]
    positions: np.ndarray
    spec: VisionSpec
    reader: ImageReader

    def cut(self, tokens: np.ndarray) -> Pictures:
        """What is left for the first tokens of the example; the cut goes through no image."""
        marks = int(np.isin(tokens, (self.spec.image_token, self.spec.video_token)).sum())
        counts = np.cumsum([self.spec.tokens(grid) for grid in self.grids])
        kept = int(np.searchsorted(counts, marks, side="right"))
        positions = self.positions[:, : len(tokens)]
        return replace(
            self, values=self.values[:kept], grids=self.grids[:kept], digests=self.digests[:kept], positions=positions
        )


def collate_pictures(rows: Sequence[Any], width: int) -> VisionBatch | None:
    """The vision inputs of rows of examples (None: blank), or None where they are of a model without eyes."""
    first = next((row.pictures for row in rows if row is not None and row.pictures is not None), None)
    if first is None:
        return None
    ready: list[Any] = []
    for row in rows:
        if row is None:
            ready.append((np.zeros(0, np.int32), np.zeros((3, 0), np.int32), []))
            continue
        held = row.pictures
        pictures = [held.reader.picture(value, row.source) for value in held.values]
        ready.append((row.tokens[:-1], held.positions[:, :-1], pictures))
    return vision_batch(ready, width, first.spec)
