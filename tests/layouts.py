"""How an array lies in memory."""

import mlx.core as mx


def has_gaps(array: mx.array) -> bool:
    """Whether the parts along its first axis do not begin where the one before ends."""
    mx.eval(array)
    return memoryview(array).strides[0] != array.nbytes // array.shape[0]


def row_distance(array: mx.array) -> int:
    """The stride of the last axis but one, in elements: where that axis is one, nothing but a convention."""
    mx.eval(array)
    return memoryview(array).strides[-2] // array.dtype.size
