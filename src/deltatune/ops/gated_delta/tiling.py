"""How the fused kernels divide one call: sizes of chunks and slices, groups of lanes, and bytes of shared memory.

A block is a threadgroup on Metal and a thread block on CUDA; a group is 32 lanes of it; a strip is 16 rows of a state.
`choose_tiling` and `choose_channel_tiling` return the first tiling that fits into a block's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Self

import mlx.core as mx

from ...machine import nvidia

Shape = tuple[int, int, int, int, int, int]
# The threadgroup memory that a block may have on Metal, in bytes.
METAL_BYTES = 32 * 1024
# The widest key head that the Metal tilings support: the scans' registers are sized for it.
WIDEST_KEY = 256
# The number of blocks that fills a large GPU. A scan with fewer blocks gives each of them fewer rows of the state.
_FULL_GPU_BLOCKS = 64
# The number of channels with products with the states in shared memory together, in an unstaged channel tiling.
_UNSTAGED_CHANNELS = 128


def padded(n: int) -> int:
    """Round up to whole tiles of 16."""
    return (n + 15) // 16 * 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a call, the dtype of q, k and v, and whether the call has a mask, and segments."""

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    masked: bool
    segmented: bool

    @classmethod
    def of(cls, shape: Shape, dtype: mx.Dtype, masked: bool, segmented: bool) -> Sizes:
        names = ("batch", "length", "key_heads", "value_heads", "key_size", "value_size")
        return cls(**dict(zip(names, shape, strict=True)), dtype=dtype, masked=masked, segmented=segmented)


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a call is divided among blocks and groups.

    Attributes:
        chunk: Positions per chunk, a multiple of 16.
        slice: Rows of the state that a block of a scan computes, a multiple of 16.
        split: Groups that share each strip of a scan's block.
        loaders: Further groups of a scan's block, which only load the next chunk.
        gradient_slice: Rows of the states that the gradient kernel reads at a time.
        stages: Buffers of the pipeline in shared memory: with 2, one chunk is loaded while another is computed.
        overlay: Whether the gradient kernel reuses the slices' memory for q and k, because memory is short.
        unstaged: Whether matrices as wide as a key stay in device memory and are read there (Metal only).
    """

    chunk: int
    slice: int
    split: int = 1
    loaders: int = 0
    gradient_slice: int
    stages: int
    overlay: bool = False
    unstaged: bool = False


@dataclass(frozen=True, kw_only=True)
class Tiling(Sizes, Division):
    """The sizes of a call with one gate per head, and how a machine divides it.

    Attributes:
        machine: `metal` or `cuda`.
        gradient_groups: Groups in a block of the gradient kernel.
    """

    machine: str
    gradient_groups: int

    @classmethod
    def made(cls, sizes: Sizes, division: Division, machine: str, gradient_groups: int) -> Self:
        return cls(**vars(sizes), **vars(division), machine=machine, gradient_groups=gradient_groups)

    @cached_property
    def launches(self) -> dict[Any, Any]:
        """The launches of the calls that were divided so, without their arrays (fused_passes.py)."""
        return {}

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def scan_groups(self) -> int:
        """The groups of lanes in a block of a scan."""
        return self.slice // 16 * self.split + self.loaders

    @property
    def scan_blocks(self) -> tuple[int, int, int]:
        """The blocks of a scan: one for each slice of a state, value head and row of the batch."""
        return -(-self.value_size // self.slice), self.value_heads, self.batch

    @property
    def input_bytes(self) -> int:
        """Bytes of an element of q, k or v in shared memory: on CUDA, fp16 is held as a pair of bf16."""
        return 4 if self.machine == "cuda" and self.dtype == mx.float16 else self.dtype.size

    @property
    def saved_dtype(self) -> mx.Dtype:
        """The dtype in which kernels hand states and their gradients to one another."""
        return mx.bfloat16 if self.dtype == mx.bfloat16 else mx.float32

    @property
    def key_stride(self) -> int:
        """Elements between rows as wide as a key; the padding spreads rows over the banks of shared memory."""
        return padded(self.key_size) + 8

    def key_rows_bytes(self, rows: int, element_bytes: int) -> int:
        """Bytes of shared memory for rows as wide as a key: none where they stay in device memory."""
        return 0 if self.unstaged else rows * self.key_stride * element_bytes

    @property
    def key_chunk_bytes(self) -> int:
        """Bytes of one chunk of q or of k."""
        return self.key_rows_bytes(self.chunk, self.input_bytes)

    @property
    def square_elements(self) -> int:
        """Elements of a [chunk, chunk] matrix with its padding."""
        return self.chunk * (self.chunk + 8)

    @property
    def saved_stride(self) -> int:
        """Elements between rows of u or of R, as wide as a chunk; in bf16 their padding has room for states' tails."""
        return self.chunk + 8 * (-(-self.key_size // 128) if self.dtype == mx.bfloat16 else 1)

    @property
    def triangle_elements(self) -> int:
        """Elements of a packed lower triangle of 16 x 16 tiles with its padding."""
        tiles = self.chunk // 16
        return 128 * tiles * (tiles + 2)

    @property
    def decay_bytes(self) -> int:
        """Bytes of the decays between the positions of a chunk, and of their products over its tiles."""
        return padded(4 * (self.chunk * 19 + self.chunk // 16))

    @cached_property
    def prepare_bytes(self) -> int:
        """Bytes of shared memory per block of the prepare kernel."""
        first = max(2 * self.key_chunk_bytes, 4 * (self.triangle_elements + self.square_elements))
        return first + 4 * self.square_elements + 76 * self.chunk + self.decay_bytes + 16

    @property
    def strip_bytes(self) -> int:
        """Bytes of a strip's tiles on their way out of a scan, and between the groups that share the strip."""
        saved, square, handed = self.saved_dtype.size, 16 * (self.chunk + 8), 16 * self.saved_stride
        if self.split > 1:
            state = 16 * self.key_stride
            return max(saved * state + 12 * square + 4 * handed, 4 * state + 8 * square + 4 * handed)
        if self.machine == "metal" or self.dtype == mx.float32:
            return 0
        return max(16 * saved * self.key_stride, 4 * handed)

    @cached_property
    def scan_bytes(self) -> int:
        """Bytes of shared memory per block of either scan."""
        values = self.chunk * (self.slice + 8) * self.input_bytes
        stage = 2 * self.key_chunk_bytes + 8 * self.triangle_elements + values + 12 * self.chunk
        return self.stages * stage + self.slice // 16 * self.strip_bytes + 16

    @property
    def gradient_stage_bytes(self) -> int:
        """Bytes of one slice of everything that the gradient kernel reads in slices."""
        rows = self.gradient_slice
        states = 2 * self.key_rows_bytes(rows, self.saved_dtype.size)
        return states + rows * self.saved_stride * 8 + self.chunk * (rows + 8) * self.input_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of shared memory per block of the gradient kernel."""
        pairs = 2 * self.key_chunk_bytes + self.square_elements * 8
        slices = (0 if self.overlay else 2 * self.key_chunk_bytes) + self.stages * self.gradient_stage_bytes
        room = max(4, self.gradient_groups // (self.chunk // 16))
        sums = self.chunk * (68 + 16 + 8 * (self.chunk // 16) + 12 * room) + 144
        return max(pairs, slices) + self.decay_bytes + sums

    @property
    def largest_bytes(self) -> int:
        return max(self.prepare_bytes, self.scan_bytes, self.gradient_bytes)

    @property
    def fits(self) -> bool:
        """Whether every kernel's block fits into the machine's shared memory."""
        limit = METAL_BYTES if self.machine == "metal" else nvidia.limits().block_bytes
        return self.largest_bytes <= limit


@dataclass(frozen=True, kw_only=True)
class ChannelTiling(Tiling):
    """The sizes of a call with a gate per key channel, and how a machine divides it. A chunk has 16 or 32 positions."""

    @property
    def prepare_groups(self) -> int:
        """Groups in a block of the prepare kernel, which share the pairs of a chunk's tiles."""
        return 4 * (self.chunk // 16)

    @property
    def saved_stride(self) -> int:
        """Elements between rows of u or of R; states have no tails here."""
        return self.chunk + 8

    @property
    def scaled_key_bytes(self) -> int:
        """Bytes of one chunk of scaled keys in full precision."""
        return self.key_rows_bytes(self.chunk, 4)

    @property
    def two_tile_bytes(self) -> int:
        """Bytes of prefix q, prefix k and suffix k, which a chunk of two tiles needs and one of one tile does not."""
        return 3 * 16 * self.key_stride * 4 * (self.chunk // 16 - 1)

    @cached_property
    def prepare_bytes(self) -> int:
        gates = 4 * self.chunk * padded(self.key_size)
        solve = 4 * self.triangle_elements + 8 * self.square_elements
        return 2 * self.key_chunk_bytes + gates + self.two_tile_bytes + solve + 72 * self.chunk + 16

    @cached_property
    def scan_bytes(self) -> int:
        """Bytes of shared memory per block of either scan."""
        values = self.chunk * (self.slice + 8) * self.input_bytes
        numbers = 4 * (self.chunk + padded(self.key_size))
        queries_and_keys = 2 * self.key_rows_bytes(self.chunk, self.saved_dtype.size)
        stage = queries_and_keys + self.scaled_key_bytes + 8 * self.triangle_elements + values + numbers
        return self.stages * stage + self.slice // 16 * self.strip_bytes + 16

    @cached_property
    def gradient_bytes(self) -> int:
        c, width = self.chunk, padded(self.key_size)
        second_tile, columns = c // 16 - 1, _UNSTAGED_CHANNELS if self.unstaged else width
        products = 3 * (c + 16 * second_tile) * (columns + 4) * 4
        pairs, by_channel = 2 * 16 * 24 * 4 * second_tile, (8 if self.unstaged else 16 + c // 4) * width
        stages = max(self.stages * self.gradient_stage_bytes, products)
        return stages + self.two_tile_bytes + pairs + 144 * c + 20 * c + by_channel + 16


def _scan_slice(heads: int, key_size: int, value_size: int, dtype: mx.Dtype) -> tuple[int, int, int]:
    """Return `slice`, `split` and `loaders` of a scan on CUDA, for `heads` = B x Hv."""
    rows = padded(value_size)
    if dtype == mx.bfloat16:
        # Measured on an H200 (docs/decisions/gated-delta.md): small slices are faster where all blocks run at once.
        split = 2 if padded(key_size) % 32 == 0 else 1
        for size, groups in ((32, split), (64, 1)):
            if size <= max(32, rows) and heads * -(-value_size // size) <= nvidia.limits().multiprocessors:
                return size, groups, 1
    return _largest_full_slice(heads, value_size), 1, 0


def _largest_full_slice(heads: int, value_size: int) -> int:
    """Return the largest slice with which a scan on CUDA fills a large GPU, else the smallest, 32."""
    sizes = [size for size in (128, 64, 32) if size <= max(32, padded(value_size))]
    return next((size for size in sizes if heads * -(-value_size // size) >= _FULL_GPU_BLOCKS), sizes[-1])


def _gradient_slices(value_size: int) -> list[int]:
    """Return the slices that divide the rows of a state evenly, the largest first."""
    return [rows for rows in (64, 32, 16) if padded(value_size) % rows == 0]


def _divisions_on_metal(key_size: int) -> list[Division]:
    """Return the divisions to try on an Apple GPU, where blocks have little memory, in order of preference."""
    short = partial(Division, gradient_slice=16, stages=1, overlay=True)
    # In chunks of 32, keys wider than 64 would need more registers than a lane has (docs/reference/metal.md).
    chunks = (32, 16) if key_size <= 64 else (16,)
    divisions = [short(chunk=chunk, slice=16 * groups) for chunk in chunks for groups in (2, 1)]
    return divisions + [short(chunk=16, slice=32, unstaged=True)] * (key_size <= WIDEST_KEY)


def _gradient_groups_on_metal(key_size: int) -> int:
    """Return the groups that share the columns of a chunk of one tile: up to eight, with one tile of keys each.

    A group holds six tiles of sums for each, and two more: with two tiles each, more than a lane's registers.
    """
    tiles = padded(key_size) // 16
    tiles_of_group = -(-tiles // 8)
    return max(4, -(-tiles // tiles_of_group))


@lru_cache(maxsize=256)
def choose_tiling(machine: str, shape: Shape, dtype: mx.Dtype, *, masked: bool, segmented: bool) -> Tiling | None:
    """Choose the tiling of a call with one gate per head.

    Args:
        machine: `metal` or `cuda`.
        shape: (B, T, Hk, Hv, Dk, Dv).
        dtype: That of q, k and v.
        masked: Whether the call has a mask.
        segmented: Whether the call has segments.

    Returns:
        The first tiling, in order of preference, that fits into the machine's shared memory, or None.
    """
    batch, _, _, value_heads, key_size, value_size = shape
    sizes, slices = Sizes.of(shape, dtype, masked, segmented), _gradient_slices(value_size)
    if machine == "metal":
        divisions = _divisions_on_metal(key_size)
    else:
        scans = [_scan_slice(batch * value_heads, key_size, value_size, dtype), (32, 1, 0)]
        chunks = (64, 32) if dtype == mx.bfloat16 and key_size <= 128 else (32, 16)
        divisions = [
            Division(chunk=chunk, slice=rows, split=split, loaders=loaders, gradient_slice=gradient_rows, stages=2)
            for chunk in chunks
            for rows, split, loaders in scans
            for gradient_rows in slices[:2]
        ]
        divisions += [
            Division(chunk=16, slice=32, gradient_slice=rows, stages=stages, overlay=stages == 1)
            for rows in slices
            for stages in (2, 1)
        ]
    for division in divisions:
        chunk = division.chunk
        if (dtype == mx.float32 and machine == "metal" and chunk > 16) or chunk // 16 % division.split:
            continue
        groups = _gradient_groups_on_metal(key_size) if machine == "metal" and chunk == 16 else 4 if chunk == 16 else 8
        tiling = Tiling.made(sizes, division, machine, groups)
        if tiling.fits:
            return tiling
    return None


@lru_cache(maxsize=256)
def choose_channel_tiling(
    machine: str, shape: Shape, dtype: mx.Dtype, *, masked: bool, segmented: bool
) -> ChannelTiling | None:
    """Choose the tiling of a call with a gate per key channel. Arguments and result are those of `choose_tiling`."""
    batch, _, _, value_heads, key_size, value_size = shape
    sizes, slices = Sizes.of(shape, dtype, masked, segmented), _gradient_slices(value_size)
    if machine == "metal":
        divisions = _divisions_on_metal(key_size)
    else:
        first = _scan_slice(batch * value_heads, key_size, value_size, dtype)
        divisions = [
            Division(chunk=chunk, slice=scan_rows, split=split, loaders=loaders, gradient_slice=rows, stages=2)
            for chunk in (32, 16)
            for scan_rows, split, loaders in (first, (64, 1, 0), (32, 1, 0), (16, 1, 0))
            for rows in sorted(slices, key=lambda rows: rows == 64)
        ]
        divisions += [Division(chunk=16, slice=16, gradient_slice=rows, stages=1, overlay=True) for rows in slices]
    for division in divisions:
        chunk = division.chunk
        if (dtype == mx.float32 and machine == "metal" and chunk > 16) or chunk // 16 % division.split:
            continue
        tiling = ChannelTiling.made(sizes, division, machine, 8 if chunk == 32 else 4)
        if tiling.fits:
            return tiling
    return None
