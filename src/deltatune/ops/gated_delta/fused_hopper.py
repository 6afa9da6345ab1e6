"""The launches of Hopper's own kernels for one gate per head in bf16.

The kernels are in ops/kernels/gated_delta/hopper_*.h, which explain how they differ from those of fused.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import HOPPER_WORDS, Arrays, Blocks, Launch, Outputs, Values
from .fused import (
    GRADIENT_ARRAYS,
    PREPARE_ARRAYS,
    PREPARED,
    REVERSED,
    SCANNED,
    DeltaKernel,
    KernelInputs,
    bodies,
    gradient_inputs,
    gradient_outputs,
    reverse_outputs,
    scan_outputs,
)
from .tiling import Shape, Tiling, choose_tiling

# The positions of a chunk; the bytes of its Z or P, and with zeros in between; the alignment of a block's memory.
_CHUNK, _TRIANGLE, _WITH_ZEROS, _ALIGNMENT = 64, 8 * 9 * 128, 8 * 12 * 128, 1024
# The rows of a state that a block of a scan computes: few for few heads, for then more multiprocessors have a block.
# Relative time per chunk: a block of 32 rows takes 5/8 of the time of one of 64 (docs/decisions/gated-delta-hopper.md).
_NARROW, _WIDE = 32, 64
_NARROW_TIME, _WIDE_TIME = 5, 8
# The sizes of heads that the kernels support.
_KEY_SIZE, _VALUE_SIZES = 128, (64, 128)
# Groups of 32 threads per block of a scan: teams of four, of which one writes, or two in the narrow forward scan.
_SCAN_GROUPS, _NARROW_SCAN_GROUPS = 12, 16
# The chunks that a scan's block has in shared memory. Of the gradient kernel, the bytes of shared memory of a block
# but for those of dy, and its groups of 32 threads.
_STAGES, _GRADIENT_BYTES, _GRADIENT_GROUPS = 3, 207_336, 16
# The blocks of the prepare kernel on a multiprocessor: each mostly waits, so that their number decides its speed.
_PREPARE_RESIDENT = 5
__all__ = ["PREPARED", "HopperTiling", "choose_hopper_tiling", "gradients", "prepare", "reverse", "scan"]
_SCAN_VALUES = ("In", "DK", "DV", "HK", "HV", "STAGES", "MASKED")


@dataclass(frozen=True, kw_only=True)
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
    def saved_stride(self) -> int:
        """Numbers of fp32 that a row of u or of R takes: high parts, four bits a position, and tails of the state."""
        return _CHUNK // 2 + _CHUNK // 8 + self.key_size // 16

    @property
    def narrow(self) -> bool:
        """Whether the scans are those of hopper_scans.h, and not those of hopper_wide_scans.h."""
        return self.slice == _NARROW

    @cached_property
    def scan_bytes(self) -> int:
        """Bytes of shared memory per block of either scan."""
        chunk, state = 2 * _CHUNK * self.slice, 2 * self.slice * self.key_size
        if self.narrow:
            # The state has low parts too, and products read the operands of a chunk in five parts.
            triangle, values, others, barriers = _TRIANGLE, chunk, 2 * state + 5 * chunk, 128
        else:
            # Rows of values are padded, and beside the state there are its tails.
            triangle, values, others, barriers = _WITH_ZEROS, chunk + 16 * _CHUNK, state + 4 * 512, 96
        stage = 4 * _CHUNK * self.key_size + 2 * triangle + values + 12 * _CHUNK
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
    narrow, wide = (-(-rows // (slice_rows * multiprocessors)) for slice_rows in (_NARROW, _WIDE))
    return _NARROW if _NARROW_TIME * narrow < _WIDE_TIME * wide else _WIDE


def _own_values(tiling: HopperTiling) -> Values:
    # One block of the gradient kernel to a multiprocessor; each takes every so manyth chunk of a key head.
    return {"STAGES": _STAGES, "HEADS": tiling.prepare_heads, "BLOCKS": nvidia.limits().multiprocessors}


def _prepare_blocks(tiling: HopperTiling) -> Blocks:
    blocks_of_head = -(-tiling.value_heads // (tiling.key_heads * tiling.prepare_heads))
    if blocks_of_head == 1:
        return tiling.chunks * tiling.key_heads, 1, tiling.batch
    return tiling.chunks, tiling.key_heads * blocks_of_head, tiling.batch


def _gradient_blocks(tiling: Tiling) -> Blocks:
    return min(nvidia.limits().multiprocessors, tiling.batch * tiling.chunks * tiling.key_heads), 1, 1


def _files(*names: str) -> tuple[str, ...]:
    return (*HOPPER_WORDS, *bodies("chunk", *names))


PREPARE = DeltaKernel(
    name="gated_delta_hopper_prepare",
    files=_files("hopper_cores", "hopper_prepare"),
    values=("In", "HK", "HV", "HEADS", "MASKED", "SEGMENTED"),
    arrays=(*PREPARE_ARRAYS, *PREPARED),
    memory="HopperPrepareMemory",
    memory_values=("HEADS",),
    bounded=True,
    resident=_PREPARE_RESIDENT,
    bytes=lambda tiling: tiling.prepare_bytes,
    blocks=_prepare_blocks,
    own_values=_own_values,
)
SCAN = DeltaKernel(
    name="gated_delta_hopper_scan",
    files=_files("hopper_cores", "hopper_scan_copies", "hopper_scans"),
    values=_SCAN_VALUES,
    arrays=("q", "k", "v", "mask", "initial", *PREPARED, *SCANNED),
    memory="HopperScanMemory",
    memory_values=("DK", "STAGES"),
    bounded=True,
    bytes=lambda tiling: tiling.scan_bytes,
    blocks=lambda tiling: tiling.scan_blocks,
    groups=lambda tiling: _NARROW_SCAN_GROUPS,
    own_values=_own_values,
)
REVERSE = replace(
    SCAN,
    name="gated_delta_hopper_reverse",
    arrays=("q", "k", "dy", "mask", "d_last", *PREPARED, *REVERSED, "taken"),
    groups=lambda tiling: _SCAN_GROUPS,
)
WIDE_SCAN = replace(
    SCAN,
    name="gated_delta_hopper_wide_scan",
    files=_files("hopper_cores", "hopper_scan_copies", "hopper_wide_scans"),
    memory="HopperWideScanMemory",
    groups=lambda tiling: _SCAN_GROUPS,
)
WIDE_REVERSE = replace(WIDE_SCAN, name="gated_delta_hopper_wide_reverse", arrays=REVERSE.arrays)
GRADIENTS = DeltaKernel(
    name="gated_delta_hopper_gradients",
    files=_files(
        "hopper_cores",
        "hopper_gradient_memory",
        "hopper_gradient_gates",
        "hopper_gradient_weights",
        "hopper_gradients",
    ),
    values=("In", "DV", "HK", "HV", "BLOCKS", "MASKED", "SEGMENTED"),
    sizes=("q_shape[1]", "q_shape[0]"),
    arrays=(*GRADIENT_ARRAYS[:-4], "taken", *GRADIENT_ARRAYS[-4:]),
    memory="HopperGradientMemory",
    memory_values=("DV",),
    bounded=True,
    bytes=lambda tiling: tiling.gradient_bytes,
    blocks=_gradient_blocks,
    groups=lambda tiling: _GRADIENT_GROUPS,
    own_values=_own_values,
)


def prepare(tiling: HopperTiling, x: KernelInputs) -> Launch:
    """Return the launch of the prepare kernel: for each chunk solve and scores in bf16, and factors [3, C]."""
    chunks = (tiling.batch, tiling.value_heads, tiling.chunks)
    triangle = ((*chunks, _TRIANGLE // 2), mx.bfloat16)
    outputs: Outputs = {"solve": triangle, "scores": triangle, "factors": ((*chunks, 3, _CHUNK), mx.float32)}
    return PREPARE.launch(tiling, x.named(*PREPARE_ARRAYS), outputs)


def _in_cores(tiling: HopperTiling, name: str, outputs: Outputs) -> Outputs:
    """Return the outputs of a scan with states that have no padding."""
    shape, dtype = outputs[name]
    return outputs | {name: ((*shape[:-1], tiling.key_size), dtype)}


def scan(tiling: HopperTiling, x: KernelInputs, prepared: Arrays) -> Launch:
    """Return the launch of the scan, with the outputs of `prepare`. It writes `scan_outputs`."""
    inputs = x.named("q", "k", "v", "mask", "initial") | prepared
    outputs = _in_cores(tiling, "states", scan_outputs(tiling, x))
    return (SCAN if tiling.narrow else WIDE_SCAN).launch(tiling, inputs, outputs)


def reverse(tiling: HopperTiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`, and dy and d_last.

    It writes `reverse_outputs`, and then `taken`: that the blocks of the gradient kernel have taken no item of work.
    """
    inputs = x.named("q", "k", "mask") | cotangents | prepared
    outputs = _in_cores(tiling, "d_states", reverse_outputs(tiling, x)) | {"taken": ((8,), mx.int32)}
    return (REVERSE if tiling.narrow else WIDE_REVERSE).launch(tiling, inputs, outputs)


def gradients(tiling: HopperTiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the gradient kernel, which counts in `taken` of the reverse scan.

    Other arguments and the outputs are those of `fused.gradients`.
    """
    launch = GRADIENTS.launch(tiling, gradient_inputs(x, scanned), gradient_outputs(tiling, x))
    return replace(launch, written={"taken": "const_cast<GLOBAL int*>(taken)"}, changes=("taken",))
