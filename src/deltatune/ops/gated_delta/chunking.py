"""How a sequence is cut into chunks, chunks into groups, and how a group lies in memory."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Elements of k that a group lays out, over all its heads: enough to keep the device busy, few enough for its caches.
_GROUP_CPU = 16 * 64 * 128
_GROUP_GPU = 1024 * 64 * 128


class Span(NamedTuple):
    """Tokens [start, stop) of one group, in that many chunks; the last chunk may be short of tokens."""

    start: int
    stop: int
    chunks: int


class Chunking(NamedTuple):
    """A sequence of `length` tokens in chunks of `size`, `group` chunks at a time."""

    length: int
    size: int
    group: int

    def groups(self) -> list[Span]:
        tokens = self.size * self.group
        starts = range(0, self.length, tokens)
        stops = [min(start + tokens, self.length) for start in starts]
        return [Span(start, stop, -(-(stop - start) // self.size)) for start, stop in zip(starts, stops, strict=True)]


def cut(length: int, heads: int, key_size: int) -> Chunking:
    """Chunk and group sizes for `heads` = batch x value heads. Measured on a CPU (docs/log.md)."""
    size = 64 if key_size > 64 else 32
    while size > 16 and size // 2 >= length:
        size //= 2
    room = _GROUP_CPU if mx.default_device() == mx.Device(mx.cpu) else _GROUP_GPU
    return Chunking(length, size, max(1, min(16, room // (heads * size * key_size))))


def chunked(x: mx.array, span: Span, size: int, key_heads: int) -> mx.array:
    """Tokens [start, stop) of x [B, T, H, ...] as [n, B, K, H / K, C, ...] in fp32, zeros after the last token."""
    start, stop, count = span
    part = x[:, start:stop].astype(mx.float32)
    missing = count * size - (stop - start)
    if missing:
        part = mx.pad(part, [(0, 0), (0, missing)] + [(0, 0)] * (part.ndim - 2))
    batch, _, heads, *rest = part.shape
    part = part.reshape(batch, count, size, key_heads, heads // key_heads, *rest)
    return part.transpose(1, 0, 3, 4, 2, *range(5, part.ndim))


def blank(like: mx.array, plan: Chunking, key_heads: int) -> mx.array:
    """Room for a whole sequence like `like` [B, T, H, ...], in chunks: zeros [B, chunks, C, K, H / K, ...].

    Writing groups into one array, which MLX does without a copy as long as nothing else reads it, halves the peak of
    keeping the parts and joining them.
    """
    batch, length, heads, *rest = like.shape
    chunks = -(-length // plan.size)
    return mx.zeros((batch, chunks, plan.size, key_heads, heads // key_heads, *rest), dtype=like.dtype)


def write(whole: mx.array, part: mx.array, span: Span, plan: Chunking) -> None:
    """Put one group, laid out by `chunked`, into its place in `whole`."""
    first = span.start // plan.size
    part = part.transpose(1, 0, 4, 2, 3, *range(5, part.ndim))
    whole[:, first : first + span.chunks] = part.astype(whole.dtype)


def tokens(whole: mx.array, plan: Chunking) -> mx.array:
    """`whole` as [B, T, H, ...]."""
    batch, chunks, size, key_heads, repeats, *rest = whole.shape
    return whole.reshape(batch, chunks * size, key_heads * repeats, *rest)[:, : plan.length]
