"""The CUDA text, compiled by NVIDIA's compiler for GPUs that this machine lacks; the launches; the cache of cubins."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.optimizers
import pytest

from deltatune.machine import nvidia
from deltatune.ops.attention.fused_op import attention_fused
from deltatune.ops.experts import grouped, grouped_hopper
from deltatune.ops.gated_delta import fused, fused_hopper
from deltatune.ops.gated_delta.fused_hopper import choose_hopper_tiling
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_on
from deltatune.ops.gated_delta.tiling import choose_channel_tiling, choose_tiling
from deltatune.ops.kernels import cubin, fatbin, launch, nvrtc
from deltatune.ops.kernels.launch import Launch
from deltatune.ops.low_rank import add_product, both_products, columns_product, rows_product
from deltatune.ops.pointwise import (
    adam,
    conv_silu,
    gated_norm,
    gates,
    norm,
    scored_swiglu,
    swiglu,
    times_gate,
    turned_heads,
)
from deltatune.ops.pointwise.joining import end_to_end
from deltatune.ops.pointwise.pass_launch import Pass
from deltatune.ops.pointwise.rows import sum_rows, take_rows
from deltatune.ops.pointwise.squares import sum_of_squares
from deltatune.ops.pointwise.unpacking import BITS, unpack
from deltatune.ops.pointwise.vocabulary_loss import vocabulary_losses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")

AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"
# The number of ELF's machine type for CUDA.
EM_CUDA = 190
# What the assembler's report says of registers that it kept in memory.
SPILLED = re.compile(r"[1-9]\d* bytes spill")


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> SimpleNamespace:
    """Pretend that MLX runs on an NVIDIA GPU of `architecture`: launches are recorded, cubins go to a new folder."""
    pretended = SimpleNamespace(architecture=HOPPER, launches=[], compiled=[], reports=[], folder=tmp_path)

    def precompiled(**given: Any) -> list[mx.array]:
        pretended.launches.append(given)
        return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

    def compiled(text: str, name: str, architecture: str) -> bytes:
        pretended.compiled.append(name)
        code, report = nvrtc.compiled_with_report(text, name, architecture)
        pretended.reports.append((name, report))
        return code

    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "_machine", lambda: "cuda")
    monkeypatch.setattr(cubin, "architecture", lambda: pretended.architecture)
    monkeypatch.setattr(nvidia, "generation", lambda: int("".join(filter(str.isdigit, pretended.architecture))))
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    # The tests look at the code itself.
    monkeypatch.setattr(fatbin, "_library", lambda: None)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", precompiled)
    forget_kernels()
    yield pretended
    forget_kernels()


def forget_kernels() -> None:
    """Let the next call build its kernels anew; tilings hold the launches that were made with them."""
    for remembered in (launch.kernel_of, cubin._built, choose_tiling, choose_channel_tiling, fused_hopper._tiling):
        remembered.cache_clear()


def gradients(function: Callable[..., Any], *arrays: mx.array) -> None:
    """Launch the forward and the backward pass of `function`."""
    mx.eval(mx.vjp(function, list(arrays), list(function(*arrays)))[1])


def gated_delta(dtype: mx.Dtype, per_channel: bool, size: int = 128) -> None:
    q, k, v = (mx.zeros((1, 70, heads, size), dtype) for heads in (1, 1, 2))
    log_g, beta = mx.zeros(v.shape if per_channel else v.shape[:3]), mx.zeros(v.shape[:3])
    gradients(lambda *arrays: gated_delta_fused(*arrays, tiling_of_call=tiling_on("cuda")), q, k, v, log_g, beta)


def scans_of_many_heads() -> None:
    q, v, gates = mx.zeros((1, 70, 1, 128), mx.bfloat16), mx.zeros((1, 70, 2, 128), mx.bfloat16), mx.zeros((1, 70, 2))
    x = fused.KernelInputs(q, q, v, gates, gates, fused.no_initial_state(), None, None)
    tiling = choose_hopper_tiling((1, 70, 1, 2, 128, 128), mx.bfloat16, masked=False, segmented=False)
    assert tiling is not None
    tiling = replace(tiling, slice=64)
    prepared = {name: mx.zeros(*kind) for name, kind in fused_hopper.prepare(tiling, x).outputs.items()}
    last = mx.zeros((1, 2, 128, 128))
    for scan in (
        fused_hopper.scan(tiling, x, prepared),
        fused_hopper.reverse(tiling, x, prepared, {"dy": v, "d_last": last}),
    ):
        mx.eval(scan.run())


def passes(dtype: mx.Dtype) -> None:
    x, weight, taps = mx.zeros((2, 20, 64), dtype), mx.zeros((64,), dtype), mx.zeros((64, 4), dtype)
    gradients(lambda *arrays: [swiglu(*arrays)], x, x)
    gradients(lambda x: [norm(x, 1.0, 1e-6)], x)
    gradients(lambda *arrays: [gated_norm(*arrays, 1e-6)], x, weight, x)
    gradients(lambda *arrays: [conv_silu(*arrays)], x, taps)
    gradients(lambda *arrays: [conv_silu(*arrays, mx.zeros((2, 17), mx.int32))], x, taps)
    gradients(gates, x, x, weight, weight)
    for heads, size in ((4, 128), (1, 64)):
        of_heads, gated = mx.zeros((2, 20, heads, size), dtype), size == 128
        gradients(lambda each, gated=gated: turned_heads(each, weight, 1e-6, 32, 1e4, gated), of_heads)
    gradients(lambda *arrays: [times_gate(*arrays)], x[:, None], x[:, :, None])
    rows, index = x.reshape(40, 64), mx.arange(40)
    mx.eval(scored_swiglu.gradients(rows, rows, rows, mx.zeros((40,))))
    mx.eval(take_rows(rows, index, execute=Pass.run), end_to_end([x, weight], execute=Pass.run))
    mx.eval(adam._step(mlx.optimizers.AdamW(0.1), None, mx.array(True), Pass.run)(*[mx.zeros((70,), dtype)] * 4))
    mx.eval(sum_of_squares([x, weight], execute=Pass.run))
    gradients(lambda logits: [vocabulary_losses(logits, index)], rows)
    for bits in BITS:
        packed = [mx.zeros((4, 8 * bits), mx.uint32), *[mx.zeros((4, 4), dtype)] * 2]
        mx.eval(unpack(packed, 64, bits, dtype))
    for weights in (None, mx.ones((20, 2))):
        mx.eval(sum_rows(rows, index.reshape(20, 2), weights, execute=Pass.run))


def experts(dtype: mx.Dtype) -> None:
    ends = mx.array([1, 40], mx.int32)
    for inputs, outputs in ((72, 136), (136, 8), (8, 72)):
        rows, d, weight = (mx.zeros(shape, dtype) for shape in ((40, inputs), (40, outputs), (2, outputs, inputs)))
        mx.eval(grouped.product(rows, weight, ends, True), grouped.product(rows, weight.swapaxes(1, 2), ends, False))
        mx.eval(grouped.product(rows, weight, ends, True, 2.0, d), grouped.gradient(None, d, rows, ends))


def experts_on_hopper() -> None:
    ends, tile = mx.array([1, 40], mx.int32), grouped_hopper.product_tile(256, 2)
    rows, weight = mx.zeros((40, 256), mx.bfloat16), mx.zeros((2, 256, 256), mx.bfloat16)
    for transpose, onto, rank in itertools.product((True, False), (None, rows), (0, 8)):
        factor = mx.zeros((2, 256, rank) if transpose else (2, rank, 256), mx.bfloat16)
        adapter = (mx.zeros((40, rank), mx.bfloat16), factor) if rank else None
        mx.eval(grouped.product(rows, weight, ends, transpose, 1.0, onto, tile, adapter))


def low_rank(dtype: mx.Dtype) -> None:
    for rows, width, rank in ((40, 64, 3), (40, 5120, 8), (9000, 9000, 64)):
        x, a, d = mx.zeros((rows, width), dtype), mx.zeros((width, rank), dtype), mx.zeros((rows, rank), dtype)
        mx.eval(rows_product(x, a, execute=Launch.run), rows_product(x, a.T, transpose=True, execute=Launch.run))
        mx.eval(columns_product(x, d, execute=Launch.run), columns_product(d, x, execute=Launch.run))
        mx.eval(both_products(x, d, a.T, execute=Launch.run), add_product(x, d, a.T, execute=Launch.run))
        mx.eval(add_product(x, d, a, transpose=True, execute=Launch.run))


def attention(machine: str) -> None:
    q, k, v = (mx.zeros((1, heads, 70, 64), mx.bfloat16) for heads in (2, 1, 1))
    gradients(lambda *arrays: [attention_fused(*arrays, scale=0.125, machine=machine)], q, k, v)


LAUNCHES = {
    "gated delta, bf16": lambda: gated_delta(mx.bfloat16, False),
    "gates a channel, bf16": lambda: gated_delta(mx.bfloat16, True),
    "passes, bf16": lambda: passes(mx.bfloat16),
    "passes, fp32": lambda: passes(mx.float32),
    "experts, bf16": lambda: experts(mx.bfloat16),
    "LoRA, bf16": lambda: low_rank(mx.bfloat16),
    "attention, bf16": lambda: attention("cuda"),
}
# One generation shows that the text is right in these types as well. In fp32, large heads would compile for 20 s.
IN_OTHER_TYPES = {
    "gated delta, fp16": lambda: gated_delta(mx.float16, False),
    "gated delta, fp32": lambda: gated_delta(mx.float32, False, 32),
    "LoRA, fp16": lambda: low_rank(mx.float16),
}
# These multiply with instructions that Hopper alone has.
ON_HOPPER = {
    "experts on Hopper": experts_on_hopper,
    "attention on Hopper": lambda: attention("hopper"),
    "gated delta with many heads": scans_of_many_heads,
}
# The fewest kernels that each of these compiles for Hopper by its own instructions.
WITH_WIDE_PRODUCTS = {"gated delta, bf16": 4, **dict.fromkeys(ON_HOPPER, 4), "gated delta with many heads": 2}
CASES = [(name, HOPPER) for name in LAUNCHES | IN_OTHER_TYPES | ON_HOPPER]
# Passes and LoRA's products are the same text on every generation, and are compiled for an older one below.
CASES += [(name, BLACKWELL) for name in LAUNCHES if not name.startswith(("passes", "LoRA"))]


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_every_kernel_compiles(name, architecture, gpu):
    """The assembler says "serialized" where products of Hopper wait each for the one before, by a factor of three."""
    gpu.architecture = architecture
    (LAUNCHES | IN_OTHER_TYPES | ON_HOPPER)[name]()
    assert {launched["name"] for launched in gpu.launches} == set(gpu.compiled) != set()
    for launched in gpu.launches:
        code = launched["compiled_source"]
        assert code.startswith(b"\x7fELF")
        assert int.from_bytes(code[18:20], "little") == EM_CUDA
        assert f"{launched['name']}\0".encode() in code
    reports = [report for kernel, report in gpu.reports if "_hopper_" in kernel]
    if name in WITH_WIDE_PRODUCTS and architecture == HOPPER:
        assert len([report for report in reports if "registers" in report]) >= WITH_WIDE_PRODUCTS[name]
    assert not [report for report in reports if "wgmma" in report]
    # Registers that did not suffice made the reverse scan of many heads take 2.2 ms where it takes 1.3.
    spilled = [kernel for kernel, report in gpu.reports if "gated_delta_hopper" in kernel and SPILLED.search(report)]
    assert not spilled


@pytest.mark.parametrize("kernels", [passes, low_rank])
def test_some_kernels_compile_for_older_gpus_too(kernels, gpu):
    gpu.architecture = AMPERE
    kernels(mx.bfloat16)
    assert gpu.launches
    assert gpu.compiled


@pytest.fixture
def small_blocks(monkeypatch):
    """Pretend that a block has 99 KB of shared memory, as on an RTX 5090."""
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(99 * 1024, 170))
    forget_kernels()
    yield
    forget_kernels()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("per_channel", [False, True])
def test_small_blocks_have_kernels_that_compile(per_channel, gpu):
    gpu.architecture = "sm_120a"
    gated_delta(mx.bfloat16, per_channel)
    assert len({launched["name"] for launched in gpu.launches}) == len(set(gpu.compiled)) == 4
    assert all(0 < launched["shared_memory"] <= 99 * 1024 for launched in gpu.launches)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("choose", [choose_tiling, choose_channel_tiling], ids=["per head", "per channel"])
def test_small_blocks_have_a_tiling_for_every_size(choose, dtype):
    for heads, keys, values in itertools.product((2, 32), (16, 128, 192, 256), (16, 128, 256)):
        assert choose("cuda", (2, 2048, heads, heads, keys, values), dtype, masked=False, segmented=False)


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
    gpu.architecture = BLACKWELL
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
        nvrtc.compiled('extern "C" __global__ void f(int* x) { *x = undefined_name; }', "f", HOPPER)


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
    attention("hopper")
    assert {launched["threadgroup"][0] for launched in gpu.launches} == {256, 384}
