"""Tests the kernels that copy arrays to page-locked memory of the host: their text compiles, and copies every byte."""

import ctypes
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.machine import nvidia
from deltatune.ops.kernels import cubin
from deltatune.ops.kernels.pinned_copies import PinnedRoom

PRETENDED = load(Path(__file__).with_name("pretended_gpu.py"))
gpu = PRETENDED.gpu

# What CUDA gives the text, and a function that runs the threads of a grid one after another.
MACHINE = """
typedef unsigned short __nv_bfloat16;
struct __attribute__((aligned(16))) uint4 { unsigned x, y, z, w; };
struct Dimensions { unsigned x; };
static Dimensions blockIdx, threadIdx, blockDim, gridDim;
#define __global__ static
"""
RUN = """
extern "C" void run(const void* x, const unsigned* place, void* y, unsigned blocks, unsigned threads) {
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            NAME((decltype(first_of(NAME)))x, place, (decltype(last_of(NAME)))y);
}
"""
TYPES = """
template <class A, class B, class C> A first_of(void (*)(A, B, C));
template <class A, class B, class C> C last_of(void (*)(A, B, C));
"""


@pytest.fixture
def pinned(monkeypatch):
    """The host's memory, of which some lies behind each room."""
    memory = aligned(1 << 20)
    monkeypatch.setattr(nvidia, "pinned", lambda size: memory.ctypes.data)
    monkeypatch.setattr(nvidia, "free_pinned", lambda address: None)
    return memory


@pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_the_text_compiles(dtype, gpu, pinned):
    room, x = PinnedRoom(64), mx.zeros((2, 3), dtype)
    mx.eval(room.write(x))
    found = room.read()
    assert (found.shape, found.dtype) == (x.shape, dtype)
    assert gpu.compiled == ["deltatune_to_host", "deltatune_from_host"]
    for launched in gpu.launches:
        assert launched["compiled_source"].startswith(b"\x7fELF")


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler's flags are Linux's")
@pytest.mark.parametrize("offset", [0, 2], ids=["aligned", "not aligned"])
def test_every_byte_comes_back(offset, pinned, monkeypatch, tmp_path):
    """More words than threads, and a tail of fewer bytes than a word; nothing behind it is touched."""

    def launched(**given):
        kernel, inputs, shape = given["kernel"], given["inputs"], given["output_shapes"][0]
        assert given["grid"][0] % given["threadgroup"][0] == 0
        blocks, threads = given["grid"][0] // given["threadgroup"][0], given["threadgroup"][0]
        to = aligned(int(np.prod(shape)) * given["output_dtypes"][0].size, offset)
        x = np.asarray(memoryview(inputs[0].reshape(-1).view(mx.uint8)))
        source = aligned(x.size, offset)
        source[:] = x
        place = np.asarray(memoryview(inputs[1]))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (source, place, to)]
        kernel.run(*pointers, ctypes.c_uint(blocks), ctypes.c_uint(threads))
        return [mx.array(to).view(given["output_dtypes"][0]).reshape(shape)]

    def called(kernel, *, inputs, **given):
        kind = (), [array.dtype for array in inputs], [0, 0], given["output_dtypes"]
        return launched(kernel=built(tmp_path, kernel.name, kernel.text(*kind)), inputs=inputs, **given)

    monkeypatch.setattr(cubin.CubinKernel, "__call__", called)
    x = mx.random.normal((3, 100_001)).astype(mx.bfloat16)
    pinned[:] = 7
    room = PinnedRoom(x.nbytes)
    assert room.write(x).tolist() == [1]
    assert mx.array_equal(room.read(), x)
    assert x.nbytes % 16
    assert x.nbytes // 16 > 2 * 32 * 512
    assert (pinned[x.nbytes :] == 7).all()


def test_memory_that_the_driver_does_not_give(monkeypatch):
    monkeypatch.setattr(nvidia, "_driver", lambda: None)
    with pytest.raises(MemoryError, match="no 1,000 bytes of page-locked memory"):
        PinnedRoom(1000)


def test_memory_is_asked_of_the_driver_and_given_back(monkeypatch):
    asked = []

    class Driver:
        def cuMemHostAlloc(self, address, size, flags):  # noqa: N802
            asked.append((size.value, flags))
            address._obj.value = 4096
            return 0

        def cuMemFreeHost(self, address):  # noqa: N802
            asked.append(address.value)

    monkeypatch.setattr(nvidia, "_driver", Driver)
    PinnedRoom(1000).free()
    assert asked == [(1000, 3), 4096]


def aligned(size, offset=0):
    """Bytes that begin so far behind a multiple of 16."""
    memory = np.zeros(size + 32, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + size]


def built(folder, name, text):
    """The text of a kernel for this machine's CPU."""
    body = "".join(line for line in text.splitlines(True) if not line.startswith("#include")).replace('extern "C" ', "")
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(MACHINE + TYPES + body + RUN.replace("NAME", name))
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-nostdlib", "-nostdinc++"]
    subprocess.run([sys.executable, "-m", "ziglang", "c++", *flags, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))
