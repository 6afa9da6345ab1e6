"""The launch of Hopper's own kernel for the gradients of q, k, log_g and beta, with one gate per head in bf16.

The kernel is in ops/kernels/gated_delta_hopper_gradients.h. It computes what `fused.gradients` launches, and reads and
writes the same arrays.
"""

from __future__ import annotations

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import Arrays, Launch, Values
from .fused import KernelInputs, call_arguments, gradient_outputs
from .tiling import Tiling

# Positions per chunk, and the sizes of the heads that the kernel takes.
CHUNK, KEY_SIZE, VALUE_SIZES = 64, 128, (64, 128)
# The bytes of shared memory of a block, those that align it among them, and its groups of 32 threads.
BYTES, GROUPS = 224_448, 12


def serves(tiling: Tiling) -> bool:
    """Return whether the kernel serves a call on MLX's GPU."""
    sizes = tiling.chunk == CHUNK and tiling.key_size == KEY_SIZE and tiling.value_size in VALUE_SIZES
    here = tiling.machine == "cuda" and nvidia.generation() == nvidia.HOPPER
    return here and sizes and tiling.dtype == mx.bfloat16 and nvidia.limits().block_bytes >= BYTES


def gradients(tiling: Tiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the kernel. Arguments and outputs are those of `fused.gradients`."""
    names = ("q", "k", "log_g", "mask", "segments")
    inputs, outputs = x.named(*names) | scanned, gradient_outputs(tiling, x)
    # One block to a multiprocessor; each takes every so manyth chunk of a key head.
    blocks = nvidia.limits().multiprocessors
    values: Values = {
        "In": tiling.dtype,
        "DV": tiling.value_size,
        "HK": tiling.key_heads,
        "HV": tiling.value_heads,
        "BLOCKS": blocks,
        "MASKED": tiling.masked,
        "SEGMENTED": tiling.segmented,
    }
    return Launch(
        name="gated_delta_hopper_gradients",
        memory="HopperGradientMemory",
        inputs=inputs,
        outputs=outputs,
        values=values,
        order=tuple(values),
        memory_order=("DV",),
        blocks=(min(blocks, tiling.batch * tiling.chunks * tiling.key_heads), 1, 1),
        bytes=BYTES,
        groups=GROUPS,
        arguments=call_arguments((*names, *scanned), tuple(inputs), tuple(outputs)),
        sizes=("q_shape[1]", "q_shape[0]"),
    )
