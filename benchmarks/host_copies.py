"""Measures how an NVIDIA GPU gets weights from the host's memory while it computes: by MLX, or by its copy engine.

usage: python benchmarks/host_copies.py [--megabytes 512] [--times 5]

One array stays in the host's memory, as layers of `deltatune train --memory` do there. MLX copies it by a kernel, on
the stream that computes; the driver's cuMemcpyAsync, on a stream of its own, into an array that stays on the GPU. Each
is timed alone and beside products of bf16 matrices that take about as long. The least of so many times counts.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import processes
from deltatune.machine import backend, host_memory, nvidia
from machine import heading

# CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_ADVISE_SET_PREFERRED_LOCATION of CUDA's cuda.h.
DEVICE, PREFERRED = 1, 3


class CopyEngine:
    """Copies between arrays by the driver, on a stream of its own."""

    def __init__(self) -> None:
        library = nvidia.library(["libcuda.so.1"])
        assert library is not None
        self._driver, context, self._stream = library, ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self._call("cuCtxSetCurrent", context)
        # CU_STREAM_NON_BLOCKING.
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(1))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise SystemExit(f"{name}: error {status} of NVIDIA's driver")

    def settle(self, array: mx.array) -> None:
        """Let a computed array stay on the GPU."""
        address, size = place(array)
        location = nvidia._Location(DEVICE, 0)
        self._call("cuMemAdvise_v2", address, size, ctypes.c_int(PREFERRED), location)
        self._call("cuMemPrefetchAsync_v2", address, size, location, ctypes.c_uint(0), self._stream)
        self.wait()

    def start(self, to: mx.array, source: mx.array) -> None:
        """Start to copy."""
        (target, size), (origin, _) = place(to), place(source)
        self._call("cuMemcpyAsync", target, origin, size, self._stream)

    def wait(self) -> None:
        """Wait until all is copied."""
        self._call("cuStreamSynchronize", self._stream)


def place(array: mx.array) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
    """The address of a computed array, which the host may use from then on, and its bytes."""
    data = np.asarray(memoryview(array))
    return ctypes.c_uint64(data.ctypes.data), ctypes.c_size_t(data.nbytes)


def least(call: Callable[[], None], times: int) -> float:
    """The least seconds of so many calls, after one that is not counted."""
    found = []
    for _ in range(times + 1):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    print(f"{heading()}\n", flush=True)
    if backend.device() != "cuda":
        sys.exit("host_copies.py: needs an NVIDIA GPU.")
    count = options.megabytes * 250_000
    source = mx.random.randint(0, 2**32 - 1, (count,), mx.uint32)
    target = mx.zeros((count,), mx.uint32)
    matrix = mx.random.normal((8192, 8192)).astype(mx.bfloat16)
    mx.eval(source, target, matrix)
    print(f"advice taken: {host_memory.stay([source])}", flush=True)
    engine = CopyEngine()
    engine.settle(target)
    print(f"one place throughout: {place(target)[0].value == place(target)[0].value}", flush=True)

    def products() -> mx.array:
        y = matrix
        for _ in range(8):
            y = (y @ matrix) * 0.01
        return y

    def by_mlx() -> mx.array:
        return mx.where(mx.array(True), source, source)

    def copied_beside() -> None:
        y = products()
        mx.async_eval(y)
        engine.start(target, source)
        engine.wait()
        mx.eval(y)

    def copied() -> None:
        engine.start(target, source)
        engine.wait()

    cases: dict[str, Callable[[], Any]] = {
        "products": lambda: mx.eval(products()),
        "MLX's copy": lambda: mx.eval(by_mlx()),
        "MLX's copy and products": lambda: mx.eval(by_mlx(), products()),
        "the copy engine": copied,
        "the copy engine beside products": copied_beside,
        "a sum over the copy": lambda: mx.eval(target.sum()),
        "a sum over the array on the host": lambda: mx.eval(source.sum()),
    }
    for name, call in cases.items():
        seconds = least(call, options.times)
        print(f"{name}: {seconds * 1e3:.2f} ms, {4 * count / seconds / 1e9:.1f} GB/s of the array", flush=True)
    print(f"equal: {mx.array_equal(source, target).item()}", flush=True)


if __name__ == "__main__":
    main()
