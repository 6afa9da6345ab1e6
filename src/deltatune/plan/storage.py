"""How an evaluated array is stored: its buffer, its strides and MLX's flags of contiguity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .graph import Node


@dataclass(slots=True, eq=False)
class Buffer:
    """One allocation of `size` bytes by a primitive of `kind`.

    `born` counts the primitives evaluated before, `reads` those before each one that read it, with that one, and `died`
    those before it was freed, None where it outlives the run. Arrays and queued operations hold `references` to it.
    """

    size: int
    kind: str
    born: int
    references: int = 0
    died: int | None = None
    reads: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StoredArray:
    """An evaluated array.

    `strides` are in elements, `data_size` is the number of elements of the buffer that it spans, and `contiguous`,
    `row` and `column` are MLX's flags.
    """

    buffer: Buffer
    shape: tuple[int, ...]
    size: int
    strides: tuple[int, ...]
    item_size: int
    data_size: int
    contiguous: bool
    row: bool
    column: bool

    def of(
        self,
        node: Node,
        buffer: Buffer | None = None,
        *,
        strides: tuple[int, ...] | None = None,
        data_size: int | None = None,
        flags: tuple[bool, bool, bool] | None = None,
    ) -> StoredArray:
        """Return the array of `node` with the buffer, strides, data size and flags of this one, but for those given."""
        return StoredArray(
            self.buffer if buffer is None else buffer,
            node.shape,
            node.size,
            self.strides if strides is None else strides,
            node.item_size,
            self.data_size if data_size is None else data_size,
            *(flags or (self.contiguous, self.row, self.column)),
        )


def product(shape: Sequence[int]) -> int:
    """The number of elements of an array of this shape."""
    size = 1
    for length in shape:
        size *= length
    return size


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense array with a contiguous last axis."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def dense(buffer: Buffer, shape: tuple[int, ...], item_size: int) -> StoredArray:
    """A row-contiguous array that fills the buffer."""
    size = product(shape)
    vector = size <= 1 or size == max(shape)
    return StoredArray(buffer, shape, size, row_strides(shape), item_size, size, True, True, vector)


def strided(buffer: Buffer, shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> StoredArray:
    """An existing array that has these strides in elements."""
    spanned, row, column = contiguity(shape, strides)
    high = 1 + sum(step * (length - 1) for step, length in zip(strides, shape, strict=True) if step > 0)
    return StoredArray(buffer, shape, product(shape), strides, item_size, high, spanned == high, row, column)


def contiguity(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, bool, bool]:
    """The number of elements without broadcast axes, and whether the array is row and column contiguous.

    Source: check_contiguity in mlx/backend/common/utils.h.
    """
    spanned = 1
    forward = 1
    backward = 1
    row = True
    column = True
    last = len(shape) - 1
    for axis in range(len(shape)):
        opposite = last - axis
        column &= strides[axis] == forward or shape[axis] == 1
        row &= strides[opposite] == backward or shape[opposite] == 1
        forward *= shape[axis]
        backward *= shape[opposite]
        if strides[axis] > 0:
            spanned *= shape[axis]
    return spanned, row, column


def collapsed(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Lengths and strides of the same elements in as few axes as possible, without axes of length 1."""
    lengths: list[int] = []
    steps: list[int] = []
    for length, step in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if lengths and steps[-1] == step * length:
            lengths[-1] *= length
            steps[-1] = step
        else:
            lengths.append(length)
            steps.append(step)
    return (lengths, steps) if lengths else ([1], [1])


def reshaped(array: StoredArray, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a reshape without a copy, or None where it needs one.

    Source: prepare_reshape in mlx/backend/common/common.cpp.
    """
    if array.size == 0 or array.row:
        return row_strides(shape)
    if not array.shape:
        return (0,) * len(shape)
    lengths, steps = collapsed(array.shape, array.strides)
    strides: list[int] = []
    at = 0
    for length in shape:
        if at < len(lengths) and length and lengths[at] % length == 0:
            lengths[at] //= length
            strides.append(lengths[at] * steps[at])
            at += lengths[at] == 1
        elif length == 1:
            strides.append(strides[-1])
        else:
            return None
    return tuple(strides)
