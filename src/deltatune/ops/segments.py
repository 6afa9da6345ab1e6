"""Tells layers which document each token of a packed batch belongs to, and builds the attention mask for it.

Models have no argument for this, so patched layers read it in the trace (tracing/trace.py). The context
`segments(array)` must enclose the whole call of mx.value_and_grad and not only the loss function: a checkpointed layer
runs again in the backward pass, after the loss function has returned.

Attention takes the rule behind a mask and never reads the mask. MLX computes an array when it is read, so such a mask
takes no memory, unless other code reads it, and then it is right there too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx

from .tracing import trace


class MaskRule(NamedTuple):
    """The positions that a causal mask of as many queries as keys hides beside later ones.

    A query sees at most `window` keys, itself and those before it (None: all), and of the documents of a packed batch
    [B, T] its own alone. If it is `read`, the model asked for an array, which its layers then read themselves.
    """

    window: int | None
    segments: mx.array | None
    read: bool = False


def remember(mask: mx.array, rule: MaskRule) -> mx.array:
    """Remember the rule of `mask` for as long as the array lives, and return the mask."""
    trace.current().known.note(mask, rule)
    return mask


def rule_of(mask: mx.array) -> MaskRule | None:
    """Return the rule that was remembered for this very array; None if there is none."""
    return trace.current().known.of(mask, MaskRule)


def current() -> mx.array | None:
    """Return the segments of the present batch, [B, T] int32, non-decreasing along T; None if it is not packed."""
    return trace.current().segments


def last_segments(tokens: int) -> mx.array | None:
    """Return the segments of the last tokens; those of a piece of attention begin with the keys of earlier pieces."""
    told = trace.current()
    return told.segments if told.segments is None or told.piece is None else told.segments[:, -tokens:]


def segments(array: mx.array | None) -> AbstractContextManager[None]:
    """Within the context, `array` gives the segments of the batch; ValueError if it is not integers of two axes.

    They are [B, T], non-decreasing along T, and equal for tokens of one document; None for rows of one document.
    """
    if array is not None and (array.ndim != 2 or not mx.issubdtype(array.dtype, mx.integer)):
        raise ValueError(f"segments: expected integers of shape [B, T], got {array.dtype} of shape {array.shape}.")
    return trace.having(segments=array)


def attention_mask(array: mx.array, window_size: int | None = None, *, read: bool = False) -> mx.array:
    """Return the causal mask [B, 1, T, T] within segments [B, T]; True where a query (row) may see a key (column).

    A query sees `window_size` positions, its own included, None for all before it. deltatune's attention remembers the
    rule behind the mask, so that it takes no memory there, unless layers `read` it, so that no other form serves.
    """
    steps = mx.arange(array.shape[1])
    queries = steps[:, None]
    keys = steps[None]
    causal = queries >= keys
    if window_size:
        causal = causal & (queries < keys + window_size)
    mask = causal & (array[:, None, :, None] == array[:, None, None, :])
    return remember(mask, MaskRule(window_size or None, array, read))
