"""The launches of Hopper's own kernels for one gate per head in bf16: prepare, scan and reverse.

The kernels are in ops/kernels/gated_delta_hopper.h, which explains how they differ from those of fused.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import Arrays, Launch, Outputs
from .fused import KernelInputs, make_launch, reverse_outputs, scan_outputs
from .tiling import Shape, Tiling, choose_tiling

# The positions of a chunk; the bytes of its Z or P; the rows of a state that a team of four groups holds; what a
# block's barriers and the alignment of its memory take.
_CHUNK, _TRIANGLE, _TEAM, _BARRIERS = 64, 8 * 12 * 128, 64, 64 + 1024
_SCAN_VALUES = ("In", "DK", "DV", "SLICE", "HK", "HV", "STAGES", "MASKED")


@dataclass(frozen=True)
class HopperTiling(Tiling):
    """The sizes of a call and how Hopper's scans divide it: a block computes `slice` rows of a state, 64 per team.

    `teams_stages` is the number of chunks that a scan's block has in shared memory.
    """

    team_stages: int = 2

    @property
    def scan_groups(self) -> int:
        return 4 + self.slice // 16

    @cached_property
    def scan_bytes(self) -> int:
        """Bytes of shared memory per block of either scan."""
        return _scan_bytes(self.key_size, self.slice, self.team_stages)


def _scan_bytes(key_size: int, rows: int, stages: int) -> int:
    stage = 4 * _CHUNK * key_size + 2 * _TRIANGLE + 2 * _CHUNK * (rows + 8) + 12 * _CHUNK
    return stages * (-(-stage // 1024) * 1024) + _BARRIERS


def choose_hopper_tiling(shape: Shape, dtype: mx.Dtype, *, masked: bool, segmented: bool) -> HopperTiling | None:
    """Return how Hopper's scans divide a call of shape (B, T, Hk, Hv, Dk, Dv); None where they do not support it."""
    batch, _, _, value_heads, key_size, value_size = shape
    other = choose_tiling("cuda", shape, dtype, masked=masked, segmented=segmented)
    if dtype != mx.bfloat16 or key_size not in (64, 128) or value_size % _TEAM or other is None:
        return None
    if other.chunk != _CHUNK or nvidia.generation() != nvidia.HOPPER:
        return None
    rows = _slice(batch * value_heads, value_size)
    stages = next(n for n in (3, 2) if _scan_bytes(key_size, rows, n) <= nvidia.H200.block_bytes)
    sizes = {field.name: getattr(other, field.name) for field in fields(other)}
    return HopperTiling(**sizes | {"slice": rows, "split": 1, "loaders": 0, "team_stages": stages})


def _slice(heads: int, value_size: int) -> int:
    """Return the rows of a state that a block computes: those with which all blocks are done first."""
    # A block of two teams takes this many times as long as one of one team (measured on an H200).
    sizes = [(64, 1.0)] + [(128, 1.6)] * (value_size % 128 == 0)

    def seconds(size: int, block: float) -> float:
        return -(-heads * value_size // size // nvidia.limits().multiprocessors) * block

    return min(sizes, key=lambda each: seconds(*each))[0]


def prepare(tiling: HopperTiling, x: KernelInputs) -> Launch:
    """Return the launch of the prepare kernel: for each chunk solve and scores in bf16, and factors [3, C]."""
    chunks = (tiling.batch, tiling.value_heads, tiling.chunks)
    names = ("q", "k", "log_g", "beta", "mask", "segments")
    triangle = ((*chunks, _TRIANGLE // 2), mx.bfloat16)
    return make_launch(
        "hopper_prepare",
        tiling,
        names,
        x.named(*names),
        {"solve": triangle, "scores": triangle, "factors": ((*chunks, 3, tiling.chunk), mx.float32)},
        memory=("PrepareMemory", ("In", "C", "DK", "UNSTAGED"), tiling.prepare_bytes),
        blocks=(tiling.chunks, tiling.value_heads, tiling.batch),
        groups=4,
        values=("In", "C", "DK", "HK", "HV", "GROUPS", "UNSTAGED", "MASKED", "SEGMENTED"),
    )


def _scan(name: str, tiling: HopperTiling, input_names: tuple[str, ...], inputs: Arrays, outputs: Outputs) -> Launch:
    return make_launch(
        f"hopper_{name}",
        tiling,
        input_names,
        inputs,
        outputs,
        memory=("HopperScanMemory", ("DK", "SLICE", "STAGES"), tiling.scan_bytes),
        blocks=tiling.scan_blocks,
        groups=tiling.scan_groups,
        values=_SCAN_VALUES,
        stages=tiling.team_stages,
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


def reverse(tiling: HopperTiling, x: KernelInputs, prepared: Arrays, dy: mx.array, d_last: mx.array) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`. It writes `reverse_outputs`."""
    names = ("q", "k", "dy", "mask", "d_last", *prepared)
    inputs = x.named("q", "k", "mask") | {"dy": dy, "d_last": d_last} | prepared
    return _scan("reverse", tiling, names, inputs, _in_cores(tiling, "d_states", reverse_outputs(tiling, x)))
