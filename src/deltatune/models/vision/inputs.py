"""Prepares the inputs of a training step on images, as NumPy arrays of shapes that repeat, so that the step compiles.

Upstream reads grids and image tokens on the host in the middle of its forward pass, which a compiled step cannot do.
Here everything is computed beforehand: where each patch lies in its image, which token gets which feature, and the
three positions of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# The number of frames, rows and columns of patches in an image or video.
Grid = tuple[int, int, int]

# The number of patches of a frame is padded to a multiple of _PATCH_STEP, up to _PATCH_STEP * _FINE_STEPS. Above that,
# the step doubles whenever the number does.
_PATCH_STEP = 64
_FINE_STEPS = 8


@dataclass(frozen=True)
class VisionSpec:
    """The numbers of a vision tower that the inputs depend on.

    A `patch` is a square of so many pixels, of `temporal` frames, with so many `values`; squares of `merge` patches
    become one token, and the table of learned positions has sides of `side`. The others are token ids: those that stand
    for a feature of an image or a video, and those before and after an image.
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
        """The number of tokens that an image or video of this grid takes."""
        return grid[0] * grid[1] * grid[2] // self.merge**2


@dataclass(frozen=True, eq=False)
class Picture:
    """The patches of one image or video, float32 [frames * rows * columns, values], in the processor's order."""

    patches: np.ndarray
    grid: Grid


class ImageShapes(NamedTuple):
    """The numbers of a batch's frames and of the patches in each, padding included, and of positions without a loss."""

    frames: int
    patches: int
    uncounted: int = 0


@dataclass(frozen=True, eq=False)
class VisionBatch:
    """B rows of T tokens with I frames of P patches each, padded to shapes that repeat. Without images, I is 0.

    `positions` int32 [3, B, T] are the time, row and column of each token, and `feature_rows` int32 [B, T] the row of
    the tower's features that it gets, -1 for text. `patches` float32 [I, P, values] have `cells` int32 [I, P, 2], a row
    and a column in the image, and interpolate between four rows of the table of positions: `position_rows` int32
    [4, I, P], with `position_weights` float32. `present` bool [I, P] is False for padding; in a frame that is all
    padding it is True throughout, because a softmax over no patches would give NaN.
    """

    positions: np.ndarray
    feature_rows: np.ndarray
    patches: np.ndarray
    cells: np.ndarray
    position_rows: np.ndarray
    position_weights: np.ndarray
    present: np.ndarray


def single_frames(grids: Sequence[Grid]) -> list[Grid]:
    """Split the grids of videos into one grid for each frame, because a prompt has text between the frames."""
    return [(1, rows, columns) for frames, rows, columns in grids for _ in range(frames)]


def token_positions(tokens: np.ndarray, grids: Sequence[Grid], spec: VisionSpec) -> np.ndarray:
    """Compute the time, row and column [3, N] int32 of each token [N], with the grids of images in order.

    Text counts up in all three. The tokens of an image count from where the text before it ended, and the text after it
    continues behind the largest of their positions. A video is given as one grid for each frame (single_frames).
    ValueError where the numbers of image tokens do not fit the grids.

    Source: Qwen3VLModel.get_rope_index in Hugging Face transformers.
    """
    marks = (tokens == spec.image_token) | (tokens == spec.video_token)
    positions = np.zeros((3, len(tokens)), np.int32)
    at = 0
    following = 0
    remaining = list(grids)
    while at < len(tokens):
        if not marks[at]:
            positions[:, at] = following
            at, following = at + 1, following + 1
            continue
        if not remaining:
            raise ValueError(f"token {at:,} belongs to an image, but there are only {len(grids)} images.")
        frames, rows, columns = remaining.pop(0)
        size = (frames, rows // spec.merge, columns // spec.merge)
        count = int(np.prod(size))
        if not marks[at : at + count].all() or at + count > len(tokens):
            raise ValueError(f"the image at token {at:,} needs {count:,} tokens.")
        positions[:, at : at + count] = np.indices(size).reshape(3, -1) + following
        at = at + count
        following = following + max(size)
    return positions


def vision_batch(
    rows: Sequence[tuple[np.ndarray, np.ndarray, Sequence[Picture]]], width: int, spec: VisionSpec
) -> VisionBatch:
    """Make the inputs of a step from rows of tokens [N], their positions [3, N] and pictures, padded to `width` tokens.

    Every image token needs its feature, so no picture may be cut off: ValueError where the numbers differ.
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
        layout = _layout(grid, spec)
        batch.cells[index, :count], batch.position_rows[:, index, :count], batch.position_weights[:, index, :count] = (
            layout
        )
        batch.present[index, count:] = False
        features[row] += range(index * per_frame, index * per_frame + count // spec.merge**2)
    for row, (tokens, positions, _) in enumerate(rows):
        batch.positions[:, row, : len(tokens)] = positions
        slots = np.flatnonzero((tokens == spec.image_token) | (tokens == spec.video_token))
        if len(slots) != len(features[row]):
            raise ValueError(f"row {row} has {len(slots):,} image tokens and {len(features[row]):,} features.")
        batch.feature_rows[row, slots] = features[row]
    return batch


def padded_patches(count: int, spec: VisionSpec) -> int:
    """The number of patches that frames are padded to: a multiple of 64 up to 512, then steps of about an eighth."""
    unit = int(np.lcm(_PATCH_STEP, spec.merge**2))
    step = unit * max(1, 2 ** max(0, int(np.log2(max(count, 1) / (unit * _FINE_STEPS)))))
    return -(-count // step) * step


def padded_frames(count: int) -> int:
    """The number of frames that a batch is padded to: `count` itself up to 4, then multiples of a power of two."""
    step = 1 if count <= 4 else 2 ** int(np.log2(count / 2))
    return -(-count // step) * step


def blank_vision_batch(rows: int, width: int, frames: tuple[int, int], spec: VisionSpec) -> VisionBatch:
    """Return a batch that holds only padding; `frames` is the number of frames, and of patches in each."""
    count, size = frames
    return VisionBatch(
        positions=np.broadcast_to(np.arange(width, dtype=np.int32), (3, rows, width)).copy(),
        feature_rows=np.full((rows, width), -1, np.int32),
        patches=np.zeros((count, size, spec.values), np.float32),
        cells=np.zeros((count, size, 2), np.int32),
        position_rows=np.zeros((4, count, size), np.int32),
        position_weights=np.zeros((4, count, size), np.float32),
        present=np.ones((count, size), bool),
    )


def _frames(picture: Picture) -> list[tuple[np.ndarray, Grid]]:
    """The patches and the grid of each frame by itself, because no patch attends to another frame."""
    count, rows, columns = picture.grid
    size = rows * columns
    return [(picture.patches[frame * size : (frame + 1) * size], (1, rows, columns)) for frame in range(count)]


def _layout(grid: Grid, spec: VisionSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of VisionBatch for one frame: cells [N, 2], position_rows [4, N] and position_weights [4, N].

    Patches are in the processor's order: merge x merge squares, row by row.
    """
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
