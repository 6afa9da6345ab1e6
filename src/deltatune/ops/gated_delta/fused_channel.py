"""The launches of the fused kernels for a gate per key channel, with the same functions as fused.py.

The kernels are in ops/kernels/gated_delta/channel.h, which explains their outputs. fused_op.py calls the functions.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernels.launch import Arrays, Launch, Outputs
from .fused import (
    BASE_VALUES,
    PREPARE_VALUES,
    SCAN_MEMORY_VALUES,
    KernelInputs,
    gradients_of,
    make_launch,
    reverse_outputs,
    scan_outputs,
)
from .tiling import ChannelTiling, padded

# The outputs of `prepare`: those that the scans take further on, and q, k and k at the chunk's end, decayed.
_FURTHER = ("solve", "scores", "factors")
_SCALED = ("queries", "keys", "ends")
PREPARED = (*_FURTHER, *_SCALED)


def prepare(tiling: ChannelTiling, x: KernelInputs) -> Launch:
    """Return the launch of the prepare kernel.

    For each chunk it writes solve, scores, factors, and the decayed queries, keys and ends [C, Dk].
    """
    chunks = (tiling.batch, tiling.value_heads, tiling.chunks)
    names = ("q", "k", "log_g", "beta", "mask", "segments")
    triangle = ((*chunks, tiling.triangle_elements), mx.float32)
    rows = (*chunks, tiling.chunk, tiling.key_stride)
    return make_launch(
        "channel_prepare",
        tiling,
        names,
        x.named(*names),
        {
            "solve": triangle,
            "scores": triangle,
            "factors": ((*chunks, tiling.chunk + padded(tiling.key_size)), mx.float32),
            "queries": (rows, tiling.saved_dtype),
            "keys": (rows, mx.float32),
            "ends": (rows, mx.float32),
        },
        memory=("ChannelPrepareMemory", ("In", "C", "DK", "UNSTAGED"), tiling.prepare_bytes),
        blocks=(tiling.chunks, tiling.value_heads, tiling.batch),
        groups=4,
        values=PREPARE_VALUES,
    )


def _scan(tiling: ChannelTiling, arrays: Arrays, prepared: Arrays, outputs: Outputs, *, reverse: bool) -> Launch:
    name, rows, state = ("reverse", "dy", "d_last") if reverse else ("scan", "v", "initial")
    scaled, further = ({key: prepared[key] for key in names} for names in (_SCALED, _FURTHER))
    return make_launch(
        f"channel_{name}",
        tiling,
        (rows, "mask", *scaled, state, *further),
        arrays | scaled | further,
        outputs,
        memory=(
            "ScanMemory",
            (*SCAN_MEMORY_VALUES, "true", "true" if reverse else "false"),
            tiling.reverse_bytes if reverse else tiling.scan_bytes,
        ),
        blocks=tiling.scan_blocks,
        groups=tiling.scan_groups,
        values=(*BASE_VALUES, "SPLIT", "UNSTAGED", "MASKED"),
    )


def scan(tiling: ChannelTiling, x: KernelInputs, prepared: Arrays) -> Launch:
    """Return the launch of the scan, with the outputs of `prepare`. It writes `fused.scan_outputs`."""
    return _scan(tiling, x.named("v", "mask", "initial"), prepared, scan_outputs(tiling, x), reverse=False)


def reverse(tiling: ChannelTiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`, dy and d_last.

    It writes `fused.reverse_outputs`.
    """
    return _scan(tiling, x.named("mask") | cotangents, prepared, reverse_outputs(tiling, x), reverse=True)


def gradients(tiling: ChannelTiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the gradient kernel. Arguments and outputs are those of `fused.gradients`."""
    return gradients_of("channel_gradients", tiling, x, scanned, "ChannelGradientMemory", ())
