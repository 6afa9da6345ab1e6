"""The primitives with views of their inputs' buffers as outputs, and the layout that each view has.

A rule returns the outputs in order, or None where MLX copies instead.

Source: common.cpp, slicing.cpp and broadcasting.cpp in mlx/backend/common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .array_layout import STATE, ArrayLayout
from .graph import Node
from .storage import StoredArray, contiguity, reshaped

View = Callable[[ArrayLayout, Node, Sequence[StoredArray]], "list[StoredArray] | None"]


def _view_of(
    source: StoredArray, node: Node, strides: tuple[int, ...], data_size: int, flags: tuple[bool, bool, bool]
) -> StoredArray:
    return StoredArray(source.buffer, node.shape, strides, node.item_size, data_size, *flags)


def _flags(source: StoredArray) -> tuple[bool, bool, bool]:
    return source.contiguous, source.row, source.column


def _first_inputs(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """The outputs of Copy, StopGradient and Depends are the first inputs."""
    outputs = node.outputs()
    return [
        _view_of(one, output, one.strides, one.data_size, _flags(one))
        for one, output in zip(inputs[: len(outputs)], outputs, strict=True)
    ]


def _last_inputs(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """The outputs of CustomTransforms are the last inputs."""
    outputs = node.outputs()
    return [
        _view_of(one, output, one.strides, one.data_size, _flags(one))
        for one, output in zip(inputs[-len(outputs) :], outputs, strict=True)
    ]


def _broadcast(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    missing = len(node.shape) - len(one.shape)
    strides = tuple(0 if length == 1 else step for length, step in zip(one.shape, one.strides, strict=True))
    grows = node.size > one.size
    flags = (one.contiguous, one.row and not grows, one.column and not grows)
    return [_view_of(one, node, (0,) * missing + strides, one.data_size, flags)]


def _expand(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    strides = list(inputs[0].strides)
    for axis in layout.vector(node.primitive):
        strides.insert(axis, 1)
    return [_view_of(inputs[0], node, tuple(strides), inputs[0].data_size, _flags(inputs[0]))]


def _squeeze(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    axes = set(layout.vector(node.primitive))
    strides = tuple(step for axis, step in enumerate(inputs[0].strides) if axis not in axes)
    return [_view_of(inputs[0], node, strides, inputs[0].data_size, _flags(inputs[0]))]


def _transpose(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    strides = tuple(one.strides[axis] for axis in layout.vector(node.primitive))
    flags = _flags(one)
    if one.contiguous and one.data_size == one.size:
        _, row, column = contiguity(node.shape, strides)
        flags = (True, row, column)
    return [_view_of(one, node, strides, one.data_size, flags)]


def _slice(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    if not node.size:
        return None
    # mlx/primitives.h: the members start, end and step are SmallVector<int, 10>, 72 bytes each.
    steps = layout.small_vector(node.primitive, STATE + 144)
    strides = tuple(step * every for step, every in zip(one.strides, steps, strict=True))
    data_size = 1 + sum(abs(step) * (length - 1) for step, length in zip(strides, node.shape, strict=True))
    spanned, row, column = contiguity(node.shape, strides)
    return [_view_of(one, node, strides, data_size, (spanned == data_size, row, column))]


def _split(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    pieces = []
    for output in node.outputs():
        data_size, row, column = contiguity(output.shape, one.strides)
        contiguous = one.contiguous
        if data_size == 1:
            contiguous = True
        elif data_size != one.data_size:
            contiguous &= row or column
        pieces.append(_view_of(one, output, one.strides, data_size, (contiguous, row, column)))
    return pieces


def _reshape(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    strides = reshaped(one, node.shape)
    if strides is None:
        return None
    flags = _flags(one)
    if one.row:
        flags = (one.contiguous, True, node.size <= 1 or node.size == max(node.shape))
    return [_view_of(one, node, strides, one.data_size, flags)]


def _view(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    before, after = one.item_size, node.item_size
    if not (before == after or (after < before and one.strides[-1] == 1) or one.row):
        return None
    strides = tuple(step * before // after for step in one.strides[:-1]) + one.strides[-1:]
    return [_view_of(one, node, strides, one.data_size * before // after, _flags(one))]


def _as_strided(layout: ArrayLayout, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    strides = layout.small_vector(node.primitive, STATE + 72, "q")
    data_size = 1 + sum(abs(step) * (length - 1) for step, length in zip(strides, node.shape, strict=True))
    spanned, row, column = contiguity(node.shape, strides)
    contiguous = spanned == data_size and all(step >= 0 for step in strides)
    return [_view_of(inputs[0], node, strides, data_size, (contiguous, row, column))]


VIEWS: dict[str, View] = {
    "Copy": _first_inputs, "StopGradient": _first_inputs, "Depends": _first_inputs, "CustomTransforms": _last_inputs,
    "Broadcast": _broadcast, "BroadcastAxes": _broadcast, "ExpandDims": _expand, "Squeeze": _squeeze,
    "Transpose": _transpose, "Slice": _slice, "Split": _split, "Reshape": _reshape, "Flatten": _reshape,
    "Unflatten": _reshape, "View": _view, "AsStrided": _as_strided,
}  # fmt: skip
