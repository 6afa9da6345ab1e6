"""Hopper's own kernels for one gate per head in bf16.

The kernels are in ops/kernels/gated_delta/hopper_*.h, which explain how they differ from those of fused.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import HOPPER_WORDS, Blocks, Kernel, Outputs, Plan, Values
from . import fused
from .fused import GRADIENT_INPUTS, GRADIENTS_OUT, PREPARED, REVERSED, SCANNED, Kernels, bodies
from .tiling import Shape, Tiling, choose_tiling

# The positions of a chunk, and the bytes of its Z or P.
_CHUNK = 64
_TRIANGLE = 8 * 9 * 128
# The rows of a state that a block of a scan computes: few for few heads, for then more multiprocessors have a block.
# Relative time per chunk: a block of 32 rows takes 5/8 of the time of one of 64 (docs/decisions/gated-delta-hopper.md).
_NARROW = 32
_WIDE = 64
_NARROW_TIME = 5
_WIDE_TIME = 8
# The sizes of heads that the kernels support.
_KEY_SIZE = 128
_VALUE_SIZES = (64, 128)
# Groups of 32 threads per block of a scan: teams of four, of which one writes, or two in the narrow forward scan.
_SCAN_GROUPS = 12
_NARROW_SCAN_GROUPS = 16
# The chunks that a scan's block has in shared memory, and the groups of the gradient kernel.
_STAGES = 3
_GRADIENT_GROUPS = 16
# The blocks of the prepare kernel on a multiprocessor: each mostly waits, so that their number decides its speed.
_PREPARE_RESIDENT = 5


@dataclass(frozen=True, kw_only=True)
class HopperTiling(Tiling):
    """The sizes of a call and how Hopper's kernels divide it: a block of a scan computes `slice` rows of a state."""

    @property
    def prepare_heads(self) -> int:
        """The value heads of a block of the prepare kernel, which share the products of their key head."""
        return min(2, self.value_heads // self.key_heads)

    @property
    def kernels(self) -> Kernels:
        return NARROW_KERNELS if self.narrow else WIDE_KERNELS

    @property
    def saved_stride(self) -> int:
        """Numbers of fp32 that a row of u or of R takes: high parts, four bits a position, and tails of the state."""
        return _CHUNK // 2 + _CHUNK // 8 + self.key_size // 16

    @property
    def narrow(self) -> bool:
        """Whether the scans are those of hopper_scans.h, and not those of hopper_wide_scans.h."""
        return self.slice == _NARROW

    @property
    def scan_groups(self) -> int:
        return _SCAN_GROUPS

    @property
    def prepare_blocks(self) -> Blocks:
        blocks_of_head = -(-self.value_heads // (self.key_heads * self.prepare_heads))
        if blocks_of_head == 1:
            return self.chunks * self.key_heads, 1, self.batch
        return self.chunks, self.key_heads * blocks_of_head, self.batch

    @property
    def gradient_blocks(self) -> Blocks:
        """One block to a multiprocessor; each takes every so manyth chunk of a key head."""
        return min(nvidia.limits().multiprocessors, self.batch * self.chunks * self.key_heads), 1, 1

    @property
    def state_stride(self) -> int:
        """Elements between rows of a state, which have no padding."""
        return self.key_size

    @property
    def prepared(self) -> Outputs:
        """The outputs of the prepare kernel: for each chunk solve and scores in bf16, and factors [3, C]."""
        triangle = ((self.batch, self.value_heads, self.chunks, _TRIANGLE // 2), mx.bfloat16)
        return super().prepared | {"solve": triangle, "scores": triangle}

    @cached_property
    def values(self) -> Values:
        sizes: Values = {"STAGES": _STAGES, "HEADS": self.prepare_heads, "BLOCKS": nvidia.limits().multiprocessors}
        return super().values | sizes

    def _plan(self, phase: str, beta: mx.Dtype) -> Plan:
        """A reverse scan also writes `taken`, zeros, where the blocks of the gradient kernel count their work."""
        plan = super()._plan(phase, beta)
        if phase == "scan" and self.narrow:
            return replace(plan, groups=_NARROW_SCAN_GROUPS)
        if phase == "reverse":
            return replace(plan, outputs=plan.outputs | {"taken": ((8,), mx.int32)})
        if phase == "gradients":
            return replace(plan, written={"taken": "const_cast<GLOBAL int*>(taken)"}, changes=("taken",))
        return plan


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
    tiling = HopperTiling(**sizes | {"chunk": _CHUNK, "slice": rows, "gradient_groups": _GRADIENT_GROUPS})
    return tiling if tiling.largest_bytes <= limits.block_bytes else None


def _rows(rows: int, multiprocessors: int) -> int:
    """Return how many of all heads' `rows` a block of a scan should compute, for the least time."""
    narrow, wide = (-(-rows // (slice_rows * multiprocessors)) for slice_rows in (_NARROW, _WIDE))
    return _NARROW if _NARROW_TIME * narrow < _WIDE_TIME * wide else _WIDE


def _files(*names: str) -> tuple[str, ...]:
    return (*HOPPER_WORDS, *bodies("chunk", *names))


_SCAN_VALUES = ("In", "DK", "DV", "HK", "HV", "STAGES", "MASKED")
PREPARE = replace(
    fused.PREPARE,
    name="gated_delta_hopper_prepare",
    files=_files("hopper_cores", "hopper_prepare"),
    values=("In", "HK", "HV", "HEADS", "MASKED", "SEGMENTED"),
    memory="HopperPrepareMemory",
    memory_values=("HEADS",),
    bounded=True,
    resident=_PREPARE_RESIDENT,
)
SCAN = Kernel(
    name="gated_delta_hopper_scan",
    files=_files("hopper_cores", "hopper_scan_copies", "hopper_scans"),
    values=_SCAN_VALUES,
    sizes=fused.SCAN.sizes,
    inputs=fused.SCAN.inputs,
    arrays=(*fused.SCAN.inputs, *SCANNED),
    memory="HopperScanMemory",
    memory_values=("DK", "STAGES"),
    bounded=True,
)
REVERSE = replace(
    SCAN,
    name="gated_delta_hopper_reverse",
    inputs=fused.REVERSE.inputs,
    arrays=("q", "k", "dy", "mask", "d_last", *PREPARED, *REVERSED, "taken"),
)
_WIDE_FILES = _files("hopper_cores", "hopper_scan_copies", "hopper_wide_scans")
WIDE_SCAN = replace(SCAN, name="gated_delta_hopper_wide_scan", files=_WIDE_FILES, memory="HopperWideScanMemory")
WIDE_REVERSE = replace(WIDE_SCAN, name="gated_delta_hopper_wide_reverse", inputs=REVERSE.inputs, arrays=REVERSE.arrays)
GRADIENTS = Kernel(
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
    inputs=(*GRADIENT_INPUTS, "taken"),
    arrays=(*GRADIENT_INPUTS, "taken", *GRADIENTS_OUT),
    memory="HopperGradientMemory",
    memory_values=("DV",),
    bounded=True,
)
NARROW_KERNELS = Kernels(PREPARE, SCAN, REVERSE, GRADIENTS)
WIDE_KERNELS = Kernels(PREPARE, WIDE_SCAN, WIDE_REVERSE, GRADIENTS)
