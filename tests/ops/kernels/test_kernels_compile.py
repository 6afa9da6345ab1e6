"""The CUDA text of every kernel, compiled by NVIDIA's compiler for several generations of GPUs."""

import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers
import pytest

from beside import load
from deltatune.machine import nvidia
from deltatune.ops.attention.fused_op import attention_fused
from deltatune.ops.decoding import gated_attention_token, linear_token, sampled_token
from deltatune.ops.decoding.gated_attention_token import GatedAttention
from deltatune.ops.decoding.linear_token import TokenBlock
from deltatune.ops.experts import grouped, grouped_hopper
from deltatune.ops.experts.grouped_hopper import GroupedProduct, Packed
from deltatune.ops.gated_delta.fused_hopper import choose_hopper_tiling
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_on
from deltatune.ops.gated_delta.fused_passes import no_initial_state
from deltatune.ops.gated_delta.tiling import choose_tiling
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.pointwise import scored_swiglu
from deltatune.ops.pointwise.adam import AdamStep
from deltatune.ops.pointwise.conv import conv_silu
from deltatune.ops.pointwise.gating import gates
from deltatune.ops.pointwise.heads import times_gate, turned_heads
from deltatune.ops.pointwise.joining import end_to_end
from deltatune.ops.pointwise.norms import gated_norm
from deltatune.ops.pointwise.rows import sum_rows, take_rows
from deltatune.ops.pointwise.silu import swiglu
from deltatune.ops.pointwise.squares import sum_of_squares
from deltatune.ops.pointwise.stored_moments import EightBitStep
from deltatune.ops.pointwise.unpacking import BITS, unpack
from deltatune.ops.pointwise.vocabulary_loss import vocabulary_losses
from deltatune.ops.products.low_rank import add_product, both_products, columns_product, rows_product

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")
PRETENDED = load(Path(__file__).with_name("pretended_gpu.py"))
gpu, forget_kernels = PRETENDED.gpu, PRETENDED.forget_kernels

AMPERE, HOPPER, BLACKWELL = PRETENDED.AMPERE, PRETENDED.HOPPER, PRETENDED.BLACKWELL
# The number of ELF's machine type for CUDA.
EM_CUDA = 190
# What the assembler's report says of registers that it kept in memory.
SPILLED = re.compile(r"[1-9]\d* bytes spill")


def gradients(function: Callable[..., Any], *arrays: mx.array) -> None:
    """Launch the forward and the backward pass of `function`."""
    mx.eval(mx.vjp(function, list(arrays), list(function(*arrays)))[1])


def gated_delta(dtype: mx.Dtype, per_channel: bool, size: int = 128) -> None:
    q, k, v = (mx.zeros((1, 70, heads, size), dtype) for heads in (1, 1, 2))
    log_g, beta = mx.zeros(v.shape if per_channel else v.shape[:3]), mx.zeros(v.shape[:3])
    gradients(lambda *arrays: gated_delta_fused(*arrays, tiling_of_call=tiling_on("cuda")), q, k, v, log_g, beta)


def scans_of_many_heads() -> None:
    q, v, gates = mx.zeros((1, 70, 1, 128), mx.bfloat16), mx.zeros((1, 70, 2, 128), mx.bfloat16), mx.zeros((1, 70, 2))
    x = {"q": q, "k": q, "v": v, "log_g": gates, "beta": gates, "initial": no_initial_state()}
    tiling = choose_hopper_tiling((1, 70, 1, 2, 128, 128), mx.bfloat16, masked=False, segmented=False)
    assert tiling is not None
    tiling = replace(tiling, slice=64)
    x |= {name: mx.zeros(*kind) for name, kind in tiling.prepared.items()}
    x |= {"dy": v, "d_last": mx.zeros((1, 2, 128, 128))}
    for phase in ("scan", "reverse"):
        mx.eval(list(tiling.run(phase, x).values()))


def passes(dtype: mx.Dtype) -> None:
    x, weight, taps = mx.zeros((2, 20, 64), dtype), mx.zeros((64,), dtype), mx.zeros((64, 4), dtype)
    gradients(lambda *arrays: [swiglu(*arrays)], x, x)
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
    mx.eval(take_rows(rows, index), end_to_end([x, weight]))
    step, large = AdamStep.begun(mlx.optimizers.AdamW(0.1), None, mx.array(True)), [mx.zeros((300,), dtype)] * 2
    mx.eval(step(*large * 2), EightBitStep(step)(*large, *[mx.zeros((300,), mx.uint8), mx.zeros((2,))] * 2))
    mx.eval(sum_of_squares([x, weight]))
    gradients(lambda logits: [vocabulary_losses(logits, index)], rows)
    for bits in BITS:
        packed = [mx.zeros((4, 8 * bits), mx.uint32), *[mx.zeros((4, 4), dtype)] * 2]
        mx.eval(unpack(packed, 64, bits, dtype))
    for weights in (None, mx.ones((20, 2))):
        mx.eval(sum_rows(rows, index.reshape(20, 2), weights))


def experts(dtype: mx.Dtype) -> None:
    ends = mx.array([1, 40], mx.int32)
    # Layouts, and a sum onto another array, by turns: the tile follows from the sizes, and the text branches on one.
    for inputs, outputs, transpose, onto in ((72, 136, True, True), (136, 8, False, False), (8, 72, True, False)):
        rows, d, weight = (mx.zeros(shape, dtype) for shape in ((40, inputs), (40, outputs), (2, outputs, inputs)))
        operands = weight if transpose else weight.swapaxes(1, 2), ends, transpose, 2.0, d if onto else None
        mx.eval(grouped.product(GroupedProduct(rows, *operands))(), grouped.gradient(None, d, rows, ends)())


def experts_on_hopper() -> None:
    ends, tile = mx.array([1, 40], mx.int32), grouped_hopper.product_tile(256, 2)
    rows, weight = mx.zeros((40, 256), mx.bfloat16), mx.zeros((2, 256, 256), mx.bfloat16)
    for transpose, onto, rank in ((True, rows, 0), (False, None, 8)):
        factor = mx.zeros((2, 256, rank) if transpose else (2, rank, 256), mx.bfloat16)
        adapter = (mx.zeros((40, rank), mx.bfloat16), factor) if rank else None
        mx.eval(grouped.product(GroupedProduct(rows, weight, ends, transpose, 1.0, onto, adapter), tile)())
    for transpose, group_size in ((True, 32), (False, 64)):
        parts = [mx.zeros((2, 256, 256 // group_size), mx.bfloat16)] * 2
        packed = Packed(mx.zeros((2, 256, 32), mx.uint32), *parts, group_size)
        mx.eval(grouped.product(GroupedProduct(rows, packed, ends, transpose), tile)())


def low_rank(dtype: mx.Dtype) -> None:
    """Launch products by turns: each in bf16 and in fp16, and for each shape in one of them; text branches on one."""
    turn = int(dtype == mx.float16)
    for rows, width, rank in ((40, 64, 3), (40, 5120, 8), (9000, 9000, 64)):
        x, a, d = mx.zeros((rows, width), dtype), mx.zeros((width, rank), dtype), mx.zeros((rows, rank), dtype)
        products = [
            partial(rows_product, x, a),
            partial(rows_product, x, a.T, transpose=True),
            partial(columns_product, x, d),
            partial(columns_product, d, x),
            partial(both_products, x, d, a.T),
            partial(add_product, x, d, a.T),
            partial(add_product, x, d, a, transpose=True),
        ]
        mx.eval([product() for product in products[turn::2]])
        turn = 1 - turn


def tokens() -> None:
    """Launch what stands in a step of a batch: with all that a linear layer takes along, and with nothing."""
    for parts, block in (((True,) * 4, TokenBlock(4, 4, 4)), ((False,) * 4, TokenBlock(2, 2, 16))):
        linear_token.trial_case(parts, mx.bfloat16, block).computed(Launch.run)
    layer = GatedAttention(8, 2, 256, 1e-6, 1e-6, 64, 1e7, 0.0625)
    gated_attention_token.trial_case(layer, True, (mx.bfloat16,) * 3).computed(Launch.run)
    sampled_token.trial_case(mx.bfloat16).computed(Launch.run)


def attention(machine: str) -> None:
    q, k, v = (mx.zeros((1, heads, 70, 64), mx.bfloat16) for heads in (2, 1, 1))
    gradients(lambda *arrays: [attention_fused(*arrays, scale=0.125, machine=machine)], q, k, v)


LAUNCHES = {
    "gated delta, bf16": lambda: gated_delta(mx.bfloat16, False),
    "gates a channel, bf16": lambda: gated_delta(mx.bfloat16, True),
    "passes, fp32": lambda: passes(mx.float32),
    "experts, bf16": lambda: experts(mx.bfloat16),
    "attention, bf16": lambda: attention("cuda"),
    "tokens, bf16": tokens,
}
# One generation shows that the text is right in these types as well. In fp32, heads of 128 would compile for 20 s.
IN_OTHER_TYPES = {
    "gated delta, fp16": lambda: gated_delta(mx.float16, False),
    "gated delta, fp32": lambda: gated_delta(mx.float32, False, 64),
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
# Each generation has kernels of its own for the gated delta rule; of other text, either shows that it is right. Passes
# and LoRA's products in bf16 are compiled for Ampere.
ON_BLACKWELL = ("gated delta, bf16", "passes, fp32", "experts, bf16")
CASES = [(name, HOPPER) for name in LAUNCHES | IN_OTHER_TYPES | ON_HOPPER if name not in ON_BLACKWELL[1:]]
CASES += [(name, BLACKWELL) for name in ON_BLACKWELL]
# Text that other cases compile too: for small blocks, for Ampere, or in another type.
WEEKLY = [("gated delta, fp16", HOPPER), ("gates a channel, bf16", HOPPER), ("LoRA, fp16", HOPPER)]
WEEKLY += [("gated delta, bf16", BLACKWELL), ("passes, fp32", BLACKWELL), ("gated delta, fp32", HOPPER)]
CASES = [pytest.param(*case, marks=[pytest.mark.weekly] * (case in WEEKLY)) for case in CASES]


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_every_kernel_compiles(name, architecture, gpu):
    """The assembler says "serialized" where products of Hopper wait each for the one before, by a factor of three."""
    gpu.architecture, gpu.fast = architecture, True
    with on(Launch.run):
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
    if name == "attention on Hopper":
        # The threads that share a block's registers as the text divides them.
        assert {launched["threadgroup"][0] for launched in gpu.launches} == {256, 384}


@pytest.mark.parametrize("kernels", [passes, low_rank])
def test_some_kernels_compile_for_older_gpus_too(kernels, gpu):
    gpu.architecture, gpu.fast = AMPERE, True
    with on(Launch.run):
        kernels(mx.bfloat16)
    assert {launched["name"] for launched in gpu.launches} == set(gpu.compiled) != set()


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
    gpu.architecture, gpu.fast = "sm_120a", True
    gated_delta(mx.bfloat16, per_channel)
    assert len({launched["name"] for launched in gpu.launches}) == len(set(gpu.compiled)) == 4
    assert all(0 < launched["shared_memory"] <= 99 * 1024 for launched in gpu.launches)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_small_blocks_have_a_tiling_for_every_size(per_channel, dtype):
    for heads, keys, values in itertools.product((2, 32), (16, 128, 192, 256), (16, 128, 256)):
        sizes = (2, 2048, heads, heads, keys, values)
        assert choose_tiling("cuda", sizes, dtype, masked=False, segmented=False, per_channel=per_channel)
