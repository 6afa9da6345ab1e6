"""The launches of Hopper's own kernels for one gate per head in bf16.

The kernels are in ops/kernels/gated_delta/hopper_*.h, which explain how they differ from those of fused.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import Arrays, Launch, Outputs, Values
from .fused import (
    PREPARED,
    KernelInputs,
    call_arguments,
    gradient_outputs,
    make_launch,
    reverse_outputs,
    scan_outputs,
)
from .tiling import Shape, Tiling, choose_tiling

# The positions of a chunk; the bytes of its Z or P; what aligns a block's memory.
_CHUNK, _TRIANGLE, _ALIGNMENT = 64, 8 * 12 * 128, 1024
# The rows of a state that a block of a scan computes: few for few heads, for then more multiprocessors have a block.
# What a chunk takes a block, in some unit: with half of the rows less, but not half (docs/log.md).
_NARROW, _WIDE = 32, 64
_NARROW_TIME, _WIDE_TIME = 5, 8
# The sizes of heads that the kernels support.
_KEY_SIZE, _VALUE_SIZES = 128, (64, 128)
# Groups of 32 threads per block of a scan: teams of four, of which one writes, or two in the narrow forward scan.
_SCAN_GROUPS, _NARROW_SCAN_GROUPS = 12, 16
# The chunks that a scan's block has in shared memory. Of the gradient kernel, the bytes of shared memory of a block
# but for those of dy, and its groups of 32 threads.
_STAGES, _GRADIENT_BYTES, _GRADIENT_GROUPS = 3, 212_368, 16
# The blocks of the prepare kernel on a multiprocessor: each mostly waits, so that their number decides its speed.
_PREPARE_RESIDENT = 5
__all__ = ["PREPARED", "HopperTiling", "choose_hopper_tiling", "gradients", "prepare", "reverse", "scan"]
_SCAN_VALUES = ("In", "DK", "DV", "HK", "HV", "STAGES", "MASKED")


@dataclass(frozen=True)
class HopperTiling(Tiling):
    """The sizes of a call and how Hopper's kernels divide it: a block of a scan computes `slice` rows of a state."""

    @property
    def prepare_heads(self) -> int:
        """The value heads of a block of the prepare kernel, which share the products of their key head."""
        return min(2, self.value_heads // self.key_heads)

    @cached_property
    def prepare_bytes(self) -> int:
        """Bytes of shared memory per block of the prepare kernel."""
        return 4 * _CHUNK * self.key_size + self.prepare_heads * 16 * (_CHUNK + 1) + 16 + 1024

    @property
    def narrow(self) -> bool:
        """Whether the scans are those of hopper_scans.h, and not those of hopper_wide_scans.h."""
        return self.slice == _NARROW

    @cached_property
    def scan_bytes(self) -> int:
        """Bytes of shared memory per block of either scan."""
        chunk, state = 2 * _CHUNK * self.slice, 2 * self.slice * self.key_size
        if self.narrow:
            # The state has low parts too, and products read what belongs to a chunk in five parts.
            values, others, barriers = chunk, 2 * state + 5 * chunk, 128
        else:
            # Rows of values are padded, and beside the state there are its tails.
            values, others, barriers = chunk + 16 * _CHUNK, state + 4 * 512, 96
        stage = 4 * _CHUNK * self.key_size + 2 * _TRIANGLE + values + 12 * _CHUNK
        return _STAGES * (-(-stage // 1024) * 1024) + others + barriers + _ALIGNMENT

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of shared memory per block of the gradient kernel."""
        return _GRADIENT_BYTES + 2 * _CHUNK * self.value_size


def choose_hopper_tiling(shape: Shape, dtype: mx.Dtype, *, masked: bool, segmented: bool) -> HopperTiling | None:
    """Return how Hopper's kernels divide a call of shape (B, T, Hk, Hv, Dk, Dv); None where they do not support it."""
    if nvidia.generation() != nvidia.HOPPER:
        return None
    return _tiling(shape, dtype, masked, segmented, nvidia.limits())


@lru_cache(maxsize=256)
def _tiling(shape: Shape, dtype: mx.Dtype, masked: bool, segmented: bool, limits: nvidia.Limits) -> HopperTiling | None:
    *_, key_size, value_size = shape
    other = choose_tiling("cuda", shape, dtype, masked=masked, segmented=segmented)
    if dtype != mx.bfloat16 or key_size != _KEY_SIZE or value_size not in _VALUE_SIZES or other is None:
        return None
    sizes = {field.name: getattr(other, field.name) for field in fields(other)}
    rows = _rows(shape[0] * shape[3] * value_size, limits.multiprocessors)
    tiling = HopperTiling(**sizes | {"chunk": _CHUNK, "slice": rows, "split": 1, "loaders": 0})
    return tiling if tiling.largest_bytes <= limits.block_bytes else None


def _rows(rows: int, multiprocessors: int) -> int:
    """Return how many of all heads' `rows` a block of a scan should compute, for the least time."""
    narrow, wide = (-(-rows // (own * multiprocessors)) for own in (_NARROW, _WIDE))
    return _NARROW if _NARROW_TIME * narrow < _WIDE_TIME * wide else _WIDE


def prepare(tiling: HopperTiling, x: KernelInputs) -> Launch:
    """Return the launch of the prepare kernel: for each chunk solve and scores in bf16, and factors [3, C]."""
    names = ("q", "k", "log_g", "beta", "mask", "segments")
    chunks = (tiling.batch, tiling.value_heads, tiling.chunks)
    triangle = ((*chunks, _TRIANGLE // 2), mx.bfloat16)
    inputs = x.named(*names)
    outputs = {"solve": triangle, "scores": triangle, "factors": ((*chunks, 3, _CHUNK), mx.float32)}
    blocks_of_head = -(-tiling.value_heads // (tiling.key_heads * tiling.prepare_heads))
    values: Values = {
        "In": tiling.dtype,
        "HK": tiling.key_heads,
        "HV": tiling.value_heads,
        "HEADS": tiling.prepare_heads,
        "MASKED": tiling.masked,
        "SEGMENTED": tiling.segmented,
    }
    return Launch(
        name="gated_delta_hopper_prepare",
        memory="HopperPrepareMemory",
        inputs=inputs,
        outputs=outputs,
        values=values,
        order=tuple(values),
        memory_order=("HEADS",),
        blocks=(tiling.chunks, tiling.key_heads * blocks_of_head, tiling.batch),
        bytes=tiling.prepare_bytes,
        arguments=call_arguments(names, tuple(inputs), tuple(outputs)),
        resident=_PREPARE_RESIDENT,
    )


def _scan(name: str, tiling: HopperTiling, input_names: tuple[str, ...], inputs: Arrays, outputs: Outputs) -> Launch:
    wide = "" if tiling.narrow else "wide_"
    return make_launch(
        f"hopper_{wide}{name}",
        tiling,
        input_names,
        inputs,
        outputs,
        memory=("HopperWideScanMemory" if wide else "HopperScanMemory", ("DK", "STAGES"), tiling.scan_bytes),
        blocks=tiling.scan_blocks,
        groups=_NARROW_SCAN_GROUPS if tiling.narrow and name == "scan" else _SCAN_GROUPS,
        values=_SCAN_VALUES,
        stages=_STAGES,
    )


def _in_cores(tiling: HopperTiling, name: str, outputs: Outputs) -> Outputs:
    """Return the outputs of a scan with states that have no padding."""
    shape, dtype = outputs[name]
    return outputs | {name: ((*shape[:-1], tiling.key_size), dtype)}


def scan(tiling: HopperTiling, x: KernelInputs, prepared: Arrays) -> Launch:
    """Return the launch of the scan, with the outputs of `prepare`. It writes `scan_outputs`."""
    names = ("q", "k", "v", "mask", "initial")
    outputs = _in_cores(tiling, "states", scan_outputs(tiling, x))
    return _scan("scan", tiling, (*names, *prepared), x.named(*names) | prepared, outputs)


def reverse(tiling: HopperTiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`, and dy and d_last.

    It writes `reverse_outputs`.
    """
    names = ("q", "k", "dy", "mask", "d_last", *prepared)
    inputs = x.named("q", "k", "mask") | cotangents | prepared
    return _scan("reverse", tiling, names, inputs, _in_cores(tiling, "d_states", reverse_outputs(tiling, x)))


def gradients(tiling: Tiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the gradient kernel. Arguments and outputs are those of `fused.gradients`."""
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
        bytes=tiling.gradient_bytes,
        groups=_GRADIENT_GROUPS,
        arguments=call_arguments((*names, *scanned), tuple(inputs), tuple(outputs)),
        sizes=("q_shape[1]", "q_shape[0]"),
    )
