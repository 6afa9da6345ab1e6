"""The launches of the fused kernels for a gate per key channel, with the same functions as fused.py.

The kernels are in ops/kernels/gated_delta/channel*.h, which explain their outputs. fused_op.py calls the functions.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from ..kernels.launch import Arrays, Launch, Outputs
from . import fused
from .fused import (
    BASE_VALUES,
    GRADIENT_ARRAYS,
    PREPARE_ARRAYS,
    REVERSED,
    SCAN_MEMORY_VALUES,
    SCANNED,
    DeltaKernel,
    KernelInputs,
    blocks_of_key_heads,
    bodies,
    gradient_inputs,
    gradient_outputs,
    gradient_slice,
    reverse_outputs,
    scan_outputs,
)
from .tiling import ChannelTiling, padded

# The outputs of `prepare`: those that the scans take further on, and q, k and k at the chunk's end, decayed.
_FURTHER = ("solve", "scores", "factors")
_SCALED = ("queries", "keys", "ends")
PREPARED = (*_FURTHER, *_SCALED)
# The blocks of the prepare kernel that fit on a multiprocessor in bf16: each mostly waits, so that more are faster.
_PREPARE_RESIDENT = 3
# channel.h calls functions in the files of kernels with one gate per head.
_OF_SCANS = ("chunk", "prepare", "strips", "scan_memory", "scan", "reverse")
_OF_GRADIENTS = ("gradient_slices", "gradient_gates", "gradients")
FILES = bodies(*_OF_SCANS, *_OF_GRADIENTS, "channel", "channel_positions", "channel_gradients")

PREPARE = replace(
    fused.PREPARE,
    name="gated_delta_channel_prepare",
    files=FILES,
    arrays=(*PREPARE_ARRAYS, *PREPARED),
    memory="ChannelPrepareMemory",
    groups=lambda tiling: tiling.prepare_groups,
    bounded=True,
    resident=_PREPARE_RESIDENT,
)
SCAN = replace(
    fused.SCAN,
    name="gated_delta_channel_scan",
    files=FILES,
    sizes=("v_shape[1]",),
    arrays=("v", "mask", *_SCALED, "initial", *_FURTHER, *SCANNED),
    memory_values=(*SCAN_MEMORY_VALUES, "true"),
)
REVERSE = replace(
    SCAN,
    name="gated_delta_channel_reverse",
    sizes=("dy_shape[1]",),
    arrays=("dy", "mask", *_SCALED, "d_last", *_FURTHER, *REVERSED),
)
GRADIENTS = DeltaKernel(
    name="gated_delta_channel_gradients",
    files=FILES,
    values=(*BASE_VALUES, "UNSTAGED", "MASKED", "SEGMENTED"),
    arrays=GRADIENT_ARRAYS,
    memory="ChannelGradientMemory",
    memory_values=("In", "C", "DK", "SLICE", "STAGES", "UNSTAGED"),
    bytes=lambda tiling: tiling.gradient_bytes,
    blocks=blocks_of_key_heads,
    groups=lambda tiling: tiling.gradient_groups,
    own_values=gradient_slice,
)


def prepare(tiling: ChannelTiling, x: KernelInputs) -> Launch:
    """Return the launch of the prepare kernel.

    For each chunk it writes solve, scores, factors, and the decayed queries, keys and ends [C, Dk].
    """
    chunks = (tiling.batch, tiling.value_heads, tiling.chunks)
    triangle = ((*chunks, tiling.triangle_elements), mx.float32)
    rows = (*chunks, tiling.chunk, tiling.key_stride)
    outputs: Outputs = {
        "solve": triangle,
        "scores": triangle,
        "factors": ((*chunks, tiling.chunk + padded(tiling.key_size)), mx.float32),
        "queries": (rows, tiling.saved_dtype),
        "keys": (rows, tiling.saved_dtype),
        "ends": (rows, mx.float32),
    }
    return PREPARE.launch(tiling, x.named(*PREPARE_ARRAYS), outputs)


def _prepared(prepared: Arrays) -> Arrays:
    return {name: prepared[name] for name in (*_SCALED, *_FURTHER)}


def scan(tiling: ChannelTiling, x: KernelInputs, prepared: Arrays) -> Launch:
    """Return the launch of the scan, with the outputs of `prepare`. It writes `fused.scan_outputs`."""
    inputs = x.named("v", "mask", "initial") | _prepared(prepared)
    return SCAN.launch(tiling, inputs, scan_outputs(tiling, x))


def reverse(tiling: ChannelTiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`, dy and d_last.

    It writes `fused.reverse_outputs`.
    """
    inputs = x.named("mask") | cotangents | _prepared(prepared)
    return REVERSE.launch(tiling, inputs, reverse_outputs(tiling, x))


def gradients(tiling: ChannelTiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the gradient kernel. Arguments and outputs are those of `fused.gradients`."""
    return GRADIENTS.launch(tiling, gradient_inputs(x, scanned), gradient_outputs(tiling, x))
