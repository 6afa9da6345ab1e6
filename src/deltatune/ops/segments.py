"""Documents packed into one row: the segments of the batch being traced, and the attention mask they ask for.

Patched layers read `current()`. Hold `with segments(array):` around the whole of mx.value_and_grad, not inside the
loss: a checkpointed layer is traced again in the backward pass, after the loss function has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

_current: ContextVar[mx.array | None] = ContextVar("segments", default=None)


def current() -> mx.array | None:
    """Segments [B, T] int32 of the batch being traced, non-decreasing along T, or None: rows are one document."""
    return _current.get()


@contextmanager
def segments(array: mx.array | None) -> Iterator[None]:
    """Trace with `array` [B, T] (integers, non-decreasing along T) as the segments; None switches packing off.

    Raises ValueError for another rank or a type that is not an integer's.
    """
    if array is not None and (array.ndim != 2 or not mx.issubdtype(array.dtype, mx.integer)):
        raise ValueError(f"segments: expected integers of shape [B, T], got {array.dtype} of shape {array.shape}.")
    token = _current.set(array)
    try:
        yield
    finally:
        _current.reset(token)


def attention_mask(array: mx.array, window_size: int | None = None) -> mx.array:
    """Causal mask [B, 1, T, T] (True: may attend) within segments [B, T], as wide as `window_size` positions back."""
    steps = mx.arange(array.shape[1])
    queries, keys = steps[:, None], steps[None]
    causal = queries >= keys
    if window_size:
        causal = causal & (queries < keys + window_size)
    return causal & (array[:, None, :, None] == array[:, None, None, :])
