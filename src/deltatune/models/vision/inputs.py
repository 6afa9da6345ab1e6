"""What a step on images needs beside tokens, as NumPy arrays of few shapes, so that the step compiles.

Upstream reads grids and placeholders on the host in the middle of its forward pass. Here all of that is worked out
beforehand: where each patch lies, which features go to which token, and every token's three positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Frames, rows and columns of patches.
Grid = tuple[int, int, int]

_PATCH_STEP = 64
_FINE = 8


@dataclass(frozen=True)
class VisionSpec:
    """The numbers of a vision tower that inputs depend on.

    patch: pixels on a side; temporal: frames a patch spans; merge: patches on a side that make one token; side: rows of
    its table of positions; values: numbers in a patch.
    """

    patch: int
    temporal: int
    merge: int
    side: int
    values: int
    image_token: int
    video_token: int
    start_token: int
    end_token: int

    def tokens(self, grid: Grid) -> int:
        """Tokens that an image or video of this grid takes."""
        return grid[0] * grid[1] * grid[2] // self.merge**2


@dataclass(frozen=True, eq=False)
class Picture:
    """The patches of one image or video, float32 [frames * rows * columns, values], in the processor's order."""

    patches: np.ndarray
    grid: Grid


class ImageShapes(NamedTuple):
    """The shapes of a batch's images: `frames` frames of `patches` patches each, padding included, and
    `silent` positions that count nothing in the loss."""

    frames: int
    patches: int
    silent: int = 0


@dataclass(frozen=True, eq=False)
class VisionBatch:
    """B rows of T tokens with I frames of P patches each, padded to shapes that come again.

    positions int32 [3,B,T]; feature int32 [B,T], the row of the features that stands at a token, -1 for text.
    patches float32 [I,P,values]; cells int32 [I,P,2], row and column; table int32 [4,I,P] and share float32 [4,I,P],
    rows of the table of positions and their weights; present bool [I,P] (a blank frame is all present: a softmax
    needs something to look at). A batch without images has I = 0.
    """

    positions: np.ndarray
    feature: np.ndarray
    patches: np.ndarray
    cells: np.ndarray
    table: np.ndarray
    share: np.ndarray
    present: np.ndarray


def single_frames(grids: Sequence[Grid]) -> list[Grid]:
    """The grids of each frame by itself: so they stand in a prompt, with text between them."""
    return [(1, rows, columns) for frames, rows, columns in grids for _ in range(frames)]


def token_positions(tokens: np.ndarray, grids: Sequence[Grid], spec: VisionSpec) -> np.ndarray:
    """int32 [3, N]: time, row and column of each token (Hugging Face: Qwen3VLModel.get_rope_index).

    Text counts on in all three; an image takes its places from where the text stopped, and the text after it goes on
    behind the largest. A video is given as one grid of one frame for each of its frames.
    """
    marks = (tokens == spec.image_token) | (tokens == spec.video_token)
    found = np.zeros((3, len(tokens)), np.int32)
    at, following, remaining = 0, 0, list(grids)
    while at < len(tokens):
        if not marks[at]:
            found[:, at] = following
            at, following = at + 1, following + 1
            continue
        if not remaining:
            raise ValueError(f"token {at} is an image's, and there are only {len(grids)} images.")
        frames, rows, columns = remaining.pop(0)
        size = (frames, rows // spec.merge, columns // spec.merge)
        count = int(np.prod(size))
        if not marks[at : at + count].all() or at + count > len(tokens):
            raise ValueError(f"the image at token {at} needs {count} tokens.")
        found[:, at : at + count] = np.indices(size).reshape(3, -1) + following
        at, following = at + count, following + max(size)
    return found


def vision_batch(
    rows: Sequence[tuple[np.ndarray, np.ndarray, Sequence[Picture]]], width: int, spec: VisionSpec
) -> VisionBatch:
    """The inputs of rows of (tokens [N], positions [3,N], pictures), padded to `width` tokens.

    Pictures follow each other as in the tokens, row by row; a row may have none. The last placeholder's picture may be
    cut off nowhere: every placeholder in `tokens` must have its feature. ValueError where counts differ.
    """
    frames = [
        (row, patches, grid)
        for row, (_, _, pictures) in enumerate(rows)
        for picture in pictures
        for patches, grid in _frames(picture)
    ]
    size = padded_patches(max((len(patches) for _, patches, _ in frames), default=0), spec)
    total = padded_frames(len(frames))
    per_frame = size // spec.merge**2
    batch = blank_vision_batch(len(rows), width, (total, size), spec)
    features: list[list[int]] = [[] for _ in rows]
    for index, (row, patches, grid) in enumerate(frames):
        count = len(patches)
        batch.patches[index, :count] = patches
        batch.cells[index, :count], batch.table[:, index, :count], batch.share[:, index, :count] = _layout(grid, spec)
        batch.present[index, count:] = False
        features[row] += range(index * per_frame, index * per_frame + count // spec.merge**2)
    for row, (tokens, positions, _) in enumerate(rows):
        batch.positions[:, row, : len(tokens)] = positions
        slots = np.flatnonzero((tokens == spec.image_token) | (tokens == spec.video_token))
        if len(slots) != len(features[row]):
            raise ValueError(f"row {row} has {len(slots)} image tokens and {len(features[row])} features.")
        batch.feature[row, slots] = features[row]
    return batch


def padded_patches(count: int, spec: VisionSpec) -> int:
    """The number of patches that frames are padded to: a multiple of 64 up to 512, then steps of about an eighth."""
    unit = int(np.lcm(_PATCH_STEP, spec.merge**2))
    step = unit * max(1, 2 ** max(0, int(np.log2(max(count, 1) / (unit * _FINE)))))
    return -(-count // step) * step


def padded_frames(count: int) -> int:
    """The number of frames that a batch is padded to: as they are up to 4, then multiples of a power of two."""
    step = 1 if count <= 4 else 2 ** int(np.log2(count / 2))
    return -(-count // step) * step


def blank_vision_batch(rows: int, width: int, frames: tuple[int, int], spec: VisionSpec) -> VisionBatch:
    """A batch of so many frames of so many patches, without a token or a patch in it."""
    count, size = frames
    return VisionBatch(
        positions=np.broadcast_to(np.arange(width, dtype=np.int32), (3, rows, width)).copy(),
        feature=np.full((rows, width), -1, np.int32),
        patches=np.zeros((count, size, spec.values), np.float32),
        cells=np.zeros((count, size, 2), np.int32),
        table=np.zeros((4, count, size), np.int32),
        share=np.zeros((4, count, size), np.float32),
        present=np.ones((count, size), bool),
    )


def _frames(picture: Picture) -> list[tuple[np.ndarray, Grid]]:
    """Each frame by itself: no patch attends to another frame."""
    count, rows, columns = picture.grid
    each = rows * columns
    return [(picture.patches[frame * each : (frame + 1) * each], (1, rows, columns)) for frame in range(count)]


def _layout(grid: Grid, spec: VisionSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places [N,2], table rows [4,N] and their weights [4,N] of a frame's patches, in groups of merge x merge."""
    _, rows, columns = grid
    shape = (rows // spec.merge, columns // spec.merge, spec.merge, spec.merge)
    block_row, block_column, row, column = np.indices(shape)
    row, column = (block_row * spec.merge + row).reshape(-1), (block_column * spec.merge + column).reshape(-1)
    y, x = (np.linspace(0, spec.side - 1, count, dtype=np.float32) for count in (rows, columns))
    top, left = y.astype(np.int32), x.astype(np.int32)
    bottom, right = np.minimum(top + 1, spec.side - 1), np.minimum(left + 1, spec.side - 1)
    down, across = (y - top)[row], (x - left)[column]
    table = [ends[row] * spec.side + sides[column] for ends in (top, bottom) for sides in (left, right)]
    share = [(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across]
    return np.stack([row, column], axis=1), np.stack(table), np.stack(share)
