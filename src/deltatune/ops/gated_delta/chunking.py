"""Cuts a sequence into chunks and chunks into groups, and moves arrays between the two layouts.

A sequence is [B, T, H, ...]. A group of n chunks is [n, B, K, H / K, C, ...]: K key heads, C tokens per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ...machine import backend
from ..tracing.turns import turns
from .group import IN_FP32, MatrixProducts

# Elements of k, over all its heads, that one group lays out: enough to keep the device busy, few enough for its caches.
_GROUP_ELEMENTS = {"cpu": 16 * 64 * 128, "metal": 1024 * 64 * 128, "cuda": 1024 * 64 * 128}


class Span(NamedTuple):
    """The tokens [start, stop) of one group and the number of its chunks; the last chunk may lack tokens.

    `left_out` counts the groups for which it stands in the trace of a plan (turns.py).
    """

    start: int
    stop: int
    chunks: int
    left_out: int = 0


class Chunking(NamedTuple):
    """How a sequence of `length` tokens is processed: chunks of `size` tokens, `group` chunks at a time."""

    length: int
    size: int
    group: int
    products: MatrixProducts = IN_FP32

    def groups(self) -> list[Span]:
        """Return the groups, which cover the sequence once, in order."""
        tokens = self.size * self.group
        spans = turns([*range(0, self.length, tokens), self.length])
        return [Span(turn.start, turn.stop, -(-(turn.stop - turn.start) // self.size), turn.left_out) for turn in spans]


def choose_chunking(length: int, heads: int, key_size: int, products: MatrixProducts = IN_FP32) -> Chunking:
    """Choose chunk and group sizes for T = `length` and `heads` = B x Hv (docs/decisions/gated-delta.md)."""
    size = 64 if key_size > 64 else 32
    while size > 16 and size // 2 >= length:
        size //= 2
    elements = backend.here(_GROUP_ELEMENTS)
    return Chunking(length, size, max(1, min(16, elements // (heads * size * key_size))), products)


def group_of(x: mx.array, span: Span, size: int, key_heads: int) -> mx.array:
    """Return the tokens of `span` in x [B, T, H, ...] as chunks [n, B, K, H / K, C, ...].

    Zeros fill the last chunk after the last token.
    """
    start, stop, count, _ = span
    part = x[:, start:stop]
    missing = count * size - (stop - start)
    if missing:
        part = mx.pad(part, [(0, 0), (0, missing)] + [(0, 0)] * (part.ndim - 2))
    batch, _, heads, *sizes = part.shape
    part = part.reshape(batch, count, size, key_heads, heads // key_heads, *sizes)
    return part.transpose(1, 0, 3, 4, 2, *range(5, part.ndim))


def empty_chunks(like: mx.array, chunking: Chunking, key_heads: int) -> mx.array:
    """Return zeros [B, chunks, C, K, H / K, ...], into which `write_group` puts a sequence like `like` [B, T, H, ...].

    MLX writes into an array without a copy as long as nothing else reads it, so this takes half the peak memory of
    collecting the groups and concatenating them.
    """
    batch, length, heads, *sizes = like.shape
    chunks = -(-length // chunking.size)
    return mx.zeros((batch, chunks, chunking.size, key_heads, heads // key_heads, *sizes), dtype=like.dtype)


def write_group(chunks: mx.array, group: mx.array, span: Span, chunking: Chunking) -> None:
    """Write a group, in the layout of `group_of`, to its place in an array made by `empty_chunks`."""
    first = span.start // chunking.size
    group = group.transpose(1, 0, 4, 2, 3, *range(5, group.ndim))
    chunks[:, first : first + span.chunks] = group.astype(chunks.dtype)


def sequence_of(chunks: mx.array, chunking: Chunking) -> mx.array:
    """Return an array made by `empty_chunks` as a sequence [B, T, H, ...]."""
    batch, count, size, key_heads, repeats, *sizes = chunks.shape
    return chunks.reshape(batch, count * size, key_heads * repeats, *sizes)[:, : chunking.length]
