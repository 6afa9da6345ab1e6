"""How kernels for NVIDIA GPUs are packed and launched, and the cache of their machine code."""

import logging
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from beside import load
from deltatune.machine import nvidia
from deltatune.ops.kernels import cubin, fatbin, launch, nvrtc
from deltatune.ops.pointwise.silu import swiglu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")
PRETENDED = load(Path(__file__).with_name("pretended_gpu.py"))
gpu, forget_kernels = PRETENDED.gpu, PRETENDED.forget_kernels


def test_the_arguments_of_a_launch(gpu):
    x, gate = mx.zeros((4, 40, 8)), mx.zeros((4, 40, 8))
    mx.eval(swiglu(gate, x))
    (launched,) = gpu.launches
    assert launched["scalars"] == [4, 40, 8]
    assert (launched["grid"], launched["threadgroup"]) == ((256, 1, 1), (128, 1, 1))
    assert (launched["output_shapes"], launched["output_dtypes"]) == ([(4, 40, 8)], [mx.float32])
    assert launched["ensure_row_contiguous"]


def test_the_text_declares_inputs_outputs_and_constants():
    kernel = cubin.CubinKernel("f", ("a", "b"), ("y",), "y[0] = a_shape[1] * N + (T)*b;\n", "// header\n", 0)
    text = kernel.text([("N", 3), ("B", True), ("T", mx.float16)], [mx.float32, mx.bool_], [2, 0], [mx.bfloat16])
    assert text.endswith(
        '// header\nextern "C" __global__ void f(const float* a, const bool* b, __nv_bfloat16* y, const int a_0, '
        "const int a_1) {\nconstexpr int N = 3;\nconstexpr bool B = 1;\nusing T = __half;\n"
        "const int a_shape[] = {a_0, a_1};\ny[0] = a_shape[1] * N + (T)*b;\n}\n"
    )


@pytest.mark.parametrize("values", [(0.5,), (0.5, 1e-6)])
def test_numbers_are_too_large_for_the_memory_that_the_host_shares(values):
    found = launch.numbers(*values)
    assert found.nbytes > 8
    assert mx.array_equal(found[: len(values)], mx.array(values))


def test_kernels_built_side_by_side_are_launched_later(gpu):
    def trace() -> list[mx.array]:
        gate = mx.ones((2, 16))
        return mx.vjp(lambda gate: [swiglu(gate, gate)], [gate], [gate])[1]

    with cubin.built_side_by_side(), cubin.built_side_by_side():
        (gradient,) = trace()
    assert mx.array_equal(gradient, mx.zeros((2, 16)))
    assert sorted(gpu.compiled) == ["swiglu_backward", "swiglu_forward"]
    assert not gpu.launches
    trace()
    assert len(gpu.compiled) == len(gpu.launches) == 2


def test_kernels_may_be_built_after_their_context_has_ended(gpu, monkeypatch):
    ended, compiled = threading.Event(), nvrtc.compiled

    def late(*arguments: Any) -> bytes:
        assert ended.wait(60)
        return compiled(*arguments)

    monkeypatch.setattr(nvrtc, "compiled", late)
    x = mx.ones((2, 16))
    with ThreadPoolExecutor() as builders:
        with cubin.built_side_by_side(builders):
            swiglu(x, x)
        assert not cubin.building()
        ended.set()
    assert gpu.compiled == ["swiglu_forward"]
    swiglu(x, x)
    assert len(gpu.compiled) == len(gpu.launches) == 1


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(gpu, monkeypatch):
    def refused(*_):
        raise RuntimeError("no such word")

    monkeypatch.setattr(nvrtc, "compiled", refused)
    x = mx.ones((2, 16))
    with cubin.built_side_by_side():
        swiglu(x, x)
    with pytest.raises(RuntimeError, match="no such word"):
        swiglu(x, x)


def code_in_a_new_process(gpu: SimpleNamespace) -> bytes:
    """Return the code that another process would launch."""
    forget_kernels()
    mx.eval(swiglu(mx.zeros((8,)), mx.zeros((8,))))
    return gpu.launches[-1]["compiled_source"]


def test_code_is_launched_packed(gpu, monkeypatch):
    code = code_in_a_new_process(gpu)
    monkeypatch.setattr(fatbin, "mode", lambda: "size")
    monkeypatch.setattr(fatbin, "packed", lambda code, architecture: b"packed for " + architecture.encode() + code)
    assert code_in_a_new_process(gpu) == b"packed for sm_90a" + code
    assert code_in_a_new_process(gpu) == b"packed for sm_90a" + code
    # The same text, packed in another way, is other code.
    assert gpu.compiled == ["swiglu_forward"] * 2


def test_one_process_builds_for_the_others(gpu):
    first = code_in_a_new_process(gpu)
    assert code_in_a_new_process(gpu) == first
    assert gpu.compiled == ["swiglu_forward"]
    gpu.architecture = PRETENDED.BLACKWELL
    assert code_in_a_new_process(gpu) != first
    assert gpu.compiled == ["swiglu_forward"] * 2


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:99] + b"x" + data[100:]]
)
def test_a_damaged_file_is_built_again(damage, gpu):
    first = code_in_a_new_process(gpu)
    (file,) = gpu.folder.rglob("*.cubin")
    file.write_bytes(damage(file.read_bytes()))
    assert code_in_a_new_process(gpu) == first
    assert gpu.compiled == ["swiglu_forward"] * 2
    assert code_in_a_new_process(gpu) == first
    assert gpu.compiled == ["swiglu_forward"] * 2


def test_a_folder_that_cannot_be_written_is_reported(gpu, caplog):
    (gpu.folder / "cubins").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert code_in_a_new_process(gpu).startswith(b"\x7fELF")
    assert "cubin of swiglu_forward cannot be stored" in caplog.text


def test_the_compilers_words_reach_the_user(gpu):
    with pytest.raises(RuntimeError, match=r"f does not compile for sm_90a: f\.cu\(1\): error: .*undefined_name"):
        nvrtc.compiled('extern "C" __global__ void f(int* x) { *x = undefined_name; }', "f", PRETENDED.HOPPER)


def test_without_the_compiler_kernels_are_refused(gpu, monkeypatch, caplog):
    monkeypatch.setattr(nvrtc, "_RELEASES", {99: ("cu99", "cu99")})
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"runtime compiler was not found: expected one of libnvrtc\.so\.99"):
            mx.eval(swiglu(mx.zeros((8,)), mx.zeros((8,))))
    finally:
        nvrtc._library.cache_clear()


@pytest.mark.parametrize(("found", "called"), [("sm_89", "sm_89"), ("sm_90", "sm_90a"), ("sm_120", "sm_120a")])
def test_architectures_by_the_compilers_names(found, called, monkeypatch):
    monkeypatch.setattr(nvidia.mx, "device_info", lambda _: {"architecture": found})
    nvidia.generation.cache_clear()
    try:
        assert cubin.architecture() == called
    finally:
        nvidia.generation.cache_clear()


def test_registers_are_shared_out_among_the_threads_of_a_block(gpu):
    kernel = cubin.CubinKernel("f", (), ("y",), "y[0] = 1;\n", "", 0, 384)
    text = kernel.text([], [], [], [mx.float32])
    assert 'extern "C" __global__ void __launch_bounds__(384, 1) f(float* y) {' in text
    several = replace(kernel, threads=128, resident=3).text([], [], [], [mx.float32])
    assert "__launch_bounds__(128, 3) f(" in several


TEXT = 'extern "C" __global__ void f(float* x) { for (int i = 0; i < 64; ++i) x[i] = x[i] * x[i + 1] + i; }'
# The first bytes of a fat binary, and where its first entry has flags and the size of the unpacked code.
MAGIC, FLAGS, UNPACKED = 0xBA55ED50, 16 + 40, 16 + 56
LZ4, ZSTD = 0x2000, 0x8000


@pytest.fixture(scope="module")
def code():
    return nvrtc.compiled(TEXT, "f", PRETENDED.HOPPER)


@pytest.mark.parametrize(
    ("driver", "mode", "flag"), [((12, 7), "speed", LZ4), ((12, 8), "size", ZSTD), ((13, 0), "size", ZSTD)]
)
def test_code_is_packed_as_the_driver_can_unpack_it(driver, mode, flag, code, monkeypatch):
    monkeypatch.setattr(nvidia, "driver_version", lambda: driver)
    assert fatbin.mode() == mode
    found = fatbin.packed(code, PRETENDED.HOPPER)
    assert struct.unpack_from("<I", found)[0] == MAGIC
    assert struct.unpack_from("<Q", found, FLAGS)[0] & (LZ4 | ZSTD) == flag
    assert struct.unpack_from("<Q", found, UNPACKED)[0] == len(code)
    assert len(found) < 0.75 * len(code)
    assert fatbin.packed(code, PRETENDED.HOPPER) == found


def test_code_that_is_no_kernel_is_refused():
    with pytest.raises(RuntimeError, match="nvFatbin cannot pack a kernel: error"):
        fatbin.packed(b"no code", PRETENDED.HOPPER)


@pytest.mark.parametrize(("release", "serves"), [((12, 5), False), ((12, 6), True), ((13, 0), True)])
def test_a_library_that_is_too_old_is_left_alone(release, serves, monkeypatch):
    class Library:
        def nvFatbinVersion(self, major, minor):  # noqa: N802
            major._obj.value, minor._obj.value = release
            return 0

    library = Library()
    monkeypatch.setattr(nvidia, "library", lambda names: library)
    fatbin._library.cache_clear()
    try:
        assert fatbin._library() is (library if serves else None)
    finally:
        fatbin._library.cache_clear()


def test_without_the_library_code_stays_as_it_is(code, monkeypatch):
    monkeypatch.setattr(fatbin, "_library", lambda: None)
    assert fatbin.mode() == "none"
    assert fatbin.packed(code, PRETENDED.HOPPER) is code
