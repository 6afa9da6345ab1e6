"""Copies arrays between an NVIDIA GPU and the host's memory, while the GPU computes.

Where a program reads an array of the GPU, MLX moves it into managed memory and uses that for other arrays later, which
is slow. Here kernels of the GPU write to page-locked memory, and read it, so that MLX's arrays stay where they are.
"""

from __future__ import annotations

import mlx.core as mx

from ...machine import nvidia
from .cubin import CubinKernel, launching

# `place` is an address on the host and a size, each as two halves of 32 bits. The bus needs few blocks.
_BLOCKS = 32
_THREADS = 512
_PLACE = """
const unsigned long long host = place[0] | (unsigned long long)place[1] << 32;
const unsigned long long size = place[2] | (unsigned long long)place[3] << 32;
const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
"""
_COPY = """
const unsigned long long words = ((unsigned long long)from | (unsigned long long)to) % 16 ? 0 : size / 16;
#pragma unroll 4
for (unsigned long long i = first; i < words; i += stride)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
for (unsigned long long i = words * 16 + first; i < size; i += stride) to[i] = from[i];
"""
_TO_HOST = CubinKernel(
    "deltatune_to_host",
    ("x", "place"),
    ("written",),
    f"""{_PLACE}
const unsigned char* __restrict__ from = reinterpret_cast<const unsigned char*>(x);
unsigned char* __restrict__ to = reinterpret_cast<unsigned char*>(host);
{_COPY}
if (first == 0) written[0] = 1;
""",
    "",
    0,
)
# Reading waits for the result of writing.
_FROM_HOST = CubinKernel(
    "deltatune_from_host",
    ("written", "place"),
    ("x",),
    f"""{_PLACE}
const unsigned char* __restrict__ from = reinterpret_cast<const unsigned char*>(host);
unsigned char* __restrict__ to = reinterpret_cast<unsigned char*>(x);
{_COPY}
""",
    "",
    0,
)


class PinnedRoom:
    """Page-locked memory of the host for one array of the GPU; MemoryError if NVIDIA's driver gives no `size` bytes."""

    def __init__(self, size: int):
        address = nvidia.pinned(size)
        if address is None:
            raise MemoryError(f"NVIDIA's driver gives no {size:,} bytes of page-locked memory")
        self.size = size
        self._address = address
        self._written = mx.array(0, mx.uint32)
        self._kind: tuple[tuple[int, ...], mx.Dtype] = (), mx.float32

    def write(self, x: mx.array) -> mx.array:
        """Copy an array into the room, on MLX's stream; return an array that is computed after the copy."""
        self._kind = x.shape, x.dtype
        self._written = _launched(_TO_HOST, [x, self._place(x.nbytes)], (1,), mx.uint32)
        return self._written

    def read(self) -> mx.array:
        """Return the array that was written, which MLX's stream copies to the GPU."""
        shape, dtype = self._kind
        size = dtype.size
        for length in shape:
            size *= length
        return _launched(_FROM_HOST, [self._written, self._place(size)], shape, dtype)

    def free(self) -> None:
        """Give the memory back; nothing may be copied any more."""
        nvidia.free_pinned(self._address)

    def _place(self, size: int) -> mx.array:
        halves = [part for number in (self._address, size) for part in (number & 0xFFFFFFFF, number >> 32)]
        return mx.array(halves, mx.uint32)


def _launched(kernel: CubinKernel, inputs: list[mx.array], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    with launching():
        return kernel(
            inputs=inputs,
            output_shapes=[shape],
            output_dtypes=[dtype],
            grid=(_BLOCKS * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            template=(),
        )[0]
