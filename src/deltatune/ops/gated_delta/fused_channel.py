"""The fused kernels for a gate per key channel, in ops/kernels/gated_delta/channel*.h, which explain their outputs."""

from __future__ import annotations

from dataclasses import replace

from . import fused
from .fused import GRADIENT_VALUES, PREPARE_INPUTS, PREPARED, REVERSED, SCAN_VALUES, SCANNED, Kernels, bodies, of_shape

# The further outputs of `prepare`: q, k and k at the chunk's end, decayed.
_SCALED = ("queries", "keys", "ends")
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
    arrays=(*PREPARE_INPUTS, *PREPARED, *_SCALED),
    memory="ChannelPrepareMemory",
    bounded=True,
    resident=_PREPARE_RESIDENT,
)
SCAN = replace(
    fused.SCAN,
    name="gated_delta_channel_scan",
    files=FILES,
    sizes=("v_shape[1]",),
    inputs=("v", "mask", "initial", *_SCALED, *PREPARED),
    arrays=(*_SCALED, "v", "mask", "initial", *PREPARED, *SCANNED),
    template=of_shape("ScanShape", SCAN_VALUES, channel=True),
)
REVERSE = replace(
    SCAN,
    name="gated_delta_channel_reverse",
    body="reverse_chunks",
    sizes=("dy_shape[1]",),
    inputs=("mask", "dy", "d_last", *_SCALED, *PREPARED),
    arrays=(*_SCALED, "dy", "mask", "d_last", *PREPARED, *REVERSED),
)
GRADIENTS = replace(
    fused.GRADIENTS,
    name="gated_delta_channel_gradients",
    files=FILES,
    template=of_shape("GradientShape", GRADIENT_VALUES, channel=True),
    memory="ChannelGradientMemory",
)
KERNELS = Kernels(PREPARE, SCAN, REVERSE, GRADIENTS, (*PREPARED, *_SCALED))
LINEAR_KERNELS = fused.without_erase(KERNELS)
