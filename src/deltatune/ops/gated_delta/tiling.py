"""How the fused kernels divide one call: sizes of chunks and slices, groups of lanes, and bytes of shared memory.

A block is a threadgroup on Metal and a thread block on CUDA; a group is 32 lanes of it; a strip is 16 rows of a state.
`choose_tiling` returns the first tiling that fits into a block's shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import Arrays, Blocks, Kernel, Launch, Outputs, Plan, Values
from . import fused
from .fused import Kernels

Shape = tuple[int, int, int, int, int, int]
# The attributes of a tiling that tell how a call is divided.
Division = dict[str, Any]
T = TypeVar("T", bound="Tiling")
# The threadgroup memory that a block may have on Metal, in bytes.
METAL_BYTES = 32 * 1024
# The widest key head that the Metal tilings support: the scans' registers are sized for it.
WIDEST_KEY = 256
# The number of blocks that fills a large GPU. A scan with fewer blocks gives each of them fewer rows of the state.
_FULL_GPU_BLOCKS = 64
# The kernels of a call, two forward and two backward.
PHASES = ("prepare", "scan", "reverse", "gradients")


def padded(n: int) -> int:
    """Round up to whole tiles of 16."""
    return (n + 15) // 16 * 16


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The sizes of a call with one gate per head, and how a machine divides it among blocks and groups.

    Attributes:
        batch, length, key_heads, value_heads, key_size, value_size: The sizes.
        dtype: That of q, k and v.
        masked, segmented: Whether the call has a mask, and segments.
        erases: Whether the call is one of gated_delta, and not of linear_attention.
        machine: `metal` or `cuda`.
        chunk: Positions per chunk, a multiple of 16.
        slice: Rows of the state that a block of a scan computes, a multiple of 16.
        split: Groups that share each strip of a scan's block.
        loaders: Further groups of a scan's block, which only load the next chunk.
        gradient_slice: Rows of the states that the gradient kernel reads at a time.
        gradient_groups: Groups in a block of the gradient kernel.
        stages: Buffers of the pipeline in shared memory: with 2, one chunk is loaded while another is computed.
        unstaged: Whether matrices as wide as a key stay in device memory and are read there (Metal only).
    """

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    masked: bool
    segmented: bool
    machine: str
    chunk: int
    slice: int
    split: int = 1
    loaders: int = 0
    gradient_slice: int
    gradient_groups: int
    stages: int
    unstaged: bool = False
    erases: bool = True

    @property
    def kernels(self) -> Kernels:
        """The kernels that are divided so."""
        return fused.KERNELS if self.erases else fused.LINEAR_KERNELS

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def scan_groups(self) -> int:
        """The groups of lanes in a block of a scan."""
        return self.slice // 16 * self.split + self.loaders

    @property
    def prepare_groups(self) -> int:
        """The groups of lanes in a block of the prepare kernel."""
        return 4

    @property
    def scan_blocks(self) -> Blocks:
        """The blocks of a scan: one for each slice of a state, value head and row of the batch."""
        return -(-self.value_size // self.slice), self.value_heads, self.batch

    @property
    def prepare_blocks(self) -> Blocks:
        """The blocks of the prepare kernel: one for each chunk of each value head."""
        return self.chunks, self.value_heads, self.batch

    @property
    def gradient_blocks(self) -> Blocks:
        """The blocks of the gradient kernel: one for each chunk of each key head."""
        return self.chunks, self.key_heads, self.batch

    @property
    def saved_dtype(self) -> mx.Dtype:
        """The dtype in which kernels hand states and their gradients to one another."""
        return mx.bfloat16 if self.dtype == mx.bfloat16 else mx.float32

    @property
    def state_stride(self) -> int:
        """Elements between rows as wide as a key; the padding spreads rows over the banks of shared memory."""
        wide = self.tails // 16 * 16 if not self.erases else 0
        return padded(self.key_size) + wide + 8

    @property
    def tails(self) -> int:
        """Elements of a row of u or R, or of a state if nothing is erased, with the tails of states saved in bf16."""
        return 8 * -(-self.key_size // 128) if self.dtype == mx.bfloat16 else 0

    @property
    def saved_stride(self) -> int:
        """Elements between rows of u or of R, which are as wide as a chunk with padding."""
        return self.chunk + max(8, self.tails)

    @property
    def saved(self) -> tuple[str, ...]:
        """The outputs of the scan that are saved for the backward pass."""
        return ("states", "u") if self.erases else ("states",)

    @property
    def gates(self) -> tuple[int, ...]:
        """The shape of the gates."""
        return self.batch, self.length, self.value_heads

    @property
    def prepared(self) -> Outputs:
        """The outputs of the prepare kernel: for each chunk the packed triangles solve and scores, and factors."""
        chunks = (self.batch, self.value_heads, self.chunks)
        tiles = self.chunk // 16
        triangle = ((*chunks, 128 * tiles * (tiles + 2)), mx.float32 if self.erases else self.saved_dtype)
        outputs: Outputs = {"scores": triangle, "factors": ((*chunks, 2 + self.erases, self.chunk), mx.float32)}
        return {"solve": triangle} | outputs if self.erases else outputs

    @cached_property
    def values(self) -> Values:
        """The compile-time values of all kernels."""
        return {
            "In": self.dtype,
            "C": self.chunk,
            "DK": self.key_size,
            "DV": self.value_size,
            "SLICE": self.slice,
            "HK": self.key_heads,
            "HV": self.value_heads,
            "STAGES": self.stages,
            "SPLIT": self.split,
            "UNSTAGED": self.unstaged,
            "MASKED": self.masked,
            "SEGMENTED": self.segmented,
            "ERASES": self.erases,
        }

    def launch(self, phase: str, arrays: Arrays) -> Launch:
        """Return the launch of the kernel of a phase, one of PHASES, on those of a call's arrays that it takes."""
        beta = arrays["beta"].dtype if self.erases else mx.float32
        stateful = phase in ("scan", "reverse") and arrays["initial"].shape[3] == self.key_size
        key = phase, beta, stateful
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(phase, beta)
            if phase == "reverse" and not stateful and not self.erases:
                # A state that was not given needs no gradient.
                del plan.outputs["d_initial"]
        kernel: Kernel = getattr(self.kernels, phase)
        return kernel.launch(arrays, plan)

    def run(self, phase: str, arrays: Arrays) -> Arrays:
        """Launch the kernel of a phase and return its outputs by name."""
        launch = self.launch(phase, arrays)
        return dict(zip(launch.outputs, launch(), strict=True))

    @cached_property
    def _plans(self) -> dict[tuple[str, mx.Dtype, bool], Plan]:
        """The plans of calls that were divided so, by phase, the dtype of beta and whether a scan has a state."""
        return {}

    def _plan(self, phase: str, beta: mx.Dtype) -> Plan:
        groups, blocks, outputs = self._of_phase(phase, beta)
        values = self.values | {"GROUPS": groups} | ({"SLICE": self.gradient_slice} if phase == "gradients" else {})
        # With whether it is a state, and not the array of `no_initial_state`.
        written = {"initial": "initial, initial_shape[3] == DK"} if phase == "scan" else {}
        written |= {"v": "dy"} if phase == "gradients" and self.erases else {}
        return Plan(
            outputs=outputs,
            values=values,
            blocks=blocks,
            groups=groups,
            written=written,
            machine=self.machine,
        )

    def _of_phase(self, phase: str, beta: mx.Dtype) -> tuple[int, Blocks, Outputs]:
        """Return groups in a block, the grid, and the outputs."""
        heads = (self.batch, self.value_heads)
        rows = padded(self.value_size)
        saved = ((*heads, self.chunks, rows, self.state_stride), self.saved_dtype)
        by_chunk = ((*heads, self.chunks, rows, self.saved_stride), mx.float32)
        state = ((*heads, self.value_size, self.key_size), mx.float32)
        tokens = (self.batch, self.length)
        values = ((*tokens, self.value_heads, self.value_size), self.dtype)
        keys = ((*tokens, self.key_heads, self.key_size), self.dtype)
        if phase == "prepare":
            return self.prepare_groups, self.prepare_blocks, self.prepared
        if phase == "scan":
            outputs = {"y": values, "states": saved, "u": by_chunk, "last": state}
            return self.scan_groups, self.scan_blocks, self._present(outputs)
        if phase == "reverse":
            outputs = {"d_states": saved, "d_right": by_chunk, "dv": values, "d_initial": state}
            return self.scan_groups, self.scan_blocks, self._present(outputs)
        outputs = {"dq": keys, "dk": keys, "d_log_g": (self.gates, mx.float32), "d_beta": (self.gates[:3], beta)}
        return self.gradient_groups, self.gradient_blocks, self._present(outputs)

    def _present(self, outputs: Outputs) -> Outputs:
        """Return the outputs of a phase but for those that only an erase needs, where nothing is erased."""
        absent = set() if self.erases else {"d_beta", "u", "d_right"}
        return {name: kind for name, kind in outputs.items() if name not in absent}

    @cached_property
    def largest_bytes(self) -> int:
        """The most shared memory of a kernel's block."""
        plans = {phase: self._plan(phase, mx.float32) for phase in PHASES}
        launches = [getattr(self.kernels, phase).launch({}, plan) for phase, plan in plans.items()]
        return max(launch.bytes for launch in launches)

    @property
    def fits(self) -> bool:
        """Whether every kernel's block fits into the machine's shared memory."""
        limit = METAL_BYTES if self.machine == "metal" else nvidia.limits().block_bytes
        return self.largest_bytes <= limit


@dataclass(frozen=True, kw_only=True)
class ChannelTiling(Tiling):
    """The sizes of a call with a gate per key channel, and how a machine divides it. A chunk has 16 or 32 positions."""

    @property
    def kernels(self) -> Kernels:
        return fused.CHANNEL_KERNELS if self.erases else fused.LINEAR_CHANNEL_KERNELS

    @property
    def prepare_groups(self) -> int:
        """Groups in a block of the prepare kernel, which share the pairs of a chunk's tiles."""
        return 4 * (self.chunk // 16)

    @property
    def tails(self) -> int:
        """None: with a gate per channel the states' bf16 is enough."""
        return 0

    @property
    def gates(self) -> tuple[int, ...]:
        return self.batch, self.length, self.value_heads, self.key_size

    @property
    def prepared(self) -> Outputs:
        """The outputs of the prepare kernel, among them the decayed queries, keys and ends [C, Dk] of each chunk."""
        chunks = (self.batch, self.value_heads, self.chunks)
        rows = (*chunks, self.chunk, self.state_stride)
        prepared = super().prepared | {
            "factors": ((*chunks, self.chunk + padded(self.key_size)), mx.float32),
            "queries": (rows, self.saved_dtype),
            "keys": (rows, self.saved_dtype),
            "ends": (rows, mx.float32),
        }
        return prepared if self.erases else {name: prepared[name] for name in prepared if name != "keys"}


def _scan(rows: int, split: int = 1, loaders: int = 0) -> Division:
    return {"slice": rows, "split": split, "loaders": loaders}


def _scan_slice(shape: Shape, dtype: mx.Dtype, erases: bool) -> Division:
    """Return how a scan on CUDA is divided."""
    batch, _, _, value_heads, key_size, value_size = shape
    heads = batch * value_heads
    rows = padded(value_size)
    if dtype == mx.bfloat16:
        # Measured on an H200 (docs/decisions/gated-delta.md): small slices are faster where all blocks run at once.
        # Without an erase two blocks fit on a multiprocessor.
        blocks = nvidia.limits().multiprocessors * (1 if erases else 2)
        split = 2 if padded(key_size) % 32 == 0 else 1
        for size, groups in ((32, split), (64, 1)):
            if size <= max(32, rows) and heads * -(-value_size // size) <= blocks:
                return _scan(size, groups, 1 if erases else 2)
    # The largest slice with which a scan fills a large GPU, else the smallest.
    sizes = [size for size in (128, 64, 32) if size <= max(32, rows)]
    return _scan(next((size for size in sizes if heads * -(-value_size // size) >= _FULL_GPU_BLOCKS), sizes[-1]))


def _gradient_slices(value_size: int) -> list[int]:
    """Return the slices that divide the rows of a state evenly, the largest first."""
    return [rows for rows in (64, 32, 16) if padded(value_size) % rows == 0]


def _divisions_on_metal(key_size: int) -> list[Division]:
    """Return the divisions to try on an Apple GPU, where blocks have little memory, in order of preference."""
    short: Division = {"gradient_slice": 16, "stages": 1}
    # In chunks of 32, keys wider than 64 would need more registers than a lane has (docs/reference/metal.md).
    chunks = (32, 16) if key_size <= 64 else (16,)
    divisions = [short | {"chunk": chunk, "slice": 16 * groups} for chunk in chunks for groups in (2, 1)]
    return divisions + [short | {"chunk": 16, "slice": 32, "unstaged": True}] * (key_size <= WIDEST_KEY)


def _gradient_groups(machine: str, key_size: int, chunk: int) -> int:
    """Return the groups that share the columns of a chunk: on Metal up to eight, with one tile of keys each.

    A group there holds six tiles of sums for each, and two more: with two tiles each, more than a lane's registers.
    """
    if chunk > 16:
        return 8
    tiles = padded(key_size) // 16
    return max(4, -(-tiles // -(-tiles // 8))) if machine == "metal" else 4


@lru_cache(maxsize=256)
def choose_tiling(
    machine: str,
    shape: Shape,
    dtype: mx.Dtype,
    *,
    masked: bool,
    segmented: bool,
    per_channel: bool = False,
    erases: bool = True,
) -> Tiling | None:
    """Choose the first tiling, in order of preference, that fits into the shared memory of `metal` or `cuda`, or None.

    `shape` is (B, T, Hk, Hv, Dk, Dv), and `dtype` that of q, k and v.
    """
    key_size = shape[4]
    if machine == "metal":
        divisions = _divisions_on_metal(key_size)
    else:
        divisions = (_channel_divisions if per_channel else _divisions)(shape, dtype, erases)
    for division in divisions:
        if per_channel:
            division["gradient_groups"] = 8 if division["chunk"] == 32 else 4
        else:
            division["gradient_groups"] = _gradient_groups(machine, key_size, division["chunk"])
    options: Division = {"machine": machine, "masked": masked, "segmented": segmented, "erases": erases}
    return _first_that_fits(partial(ChannelTiling if per_channel else Tiling, **options), shape, dtype, divisions)


def _divisions(shape: Shape, dtype: mx.Dtype, erases: bool) -> list[Division]:
    """Return the divisions to try on CUDA with one gate per head, in order of preference."""
    *_, key_size, value_size = shape
    slices = _gradient_slices(value_size)
    chunks = (64, 32) if dtype == mx.bfloat16 and key_size <= 128 else (32, 16)
    divisions = [
        scan | {"chunk": chunk, "gradient_slice": rows, "stages": 2}
        for chunk in chunks
        for scan in (_scan_slice(shape, dtype, erases), _scan(32))
        for rows in slices[:2]
    ]
    return divisions + [
        {"chunk": 16, "slice": 32, "gradient_slice": rows, "stages": stages} for rows in slices for stages in (2, 1)
    ]


def _channel_divisions(shape: Shape, dtype: mx.Dtype, erases: bool) -> list[Division]:
    """Return the divisions to try on CUDA with a gate per key channel, in order of preference."""
    slices = _gradient_slices(shape[5])
    divisions = [
        scan | {"chunk": chunk, "gradient_slice": rows, "stages": 2}
        for chunk in (32, 16)
        for scan in (_scan_slice(shape, dtype, erases), _scan(64), _scan(32), _scan(16))
        for rows in sorted(slices, key=lambda rows: rows == 64)
    ]
    return divisions + [{"chunk": 16, "slice": 16, "stages": 1, "gradient_slice": rows} for rows in slices]


def _first_that_fits(kind: Callable[..., T], shape: Shape, dtype: mx.Dtype, divisions: list[Division]) -> T | None:
    """Return the first tiling that a machine's kernels support and its shared memory holds."""
    names = ("batch", "length", "key_heads", "value_heads", "key_size", "value_size")
    for division in divisions:
        tiling = kind(**dict(zip(names, shape, strict=True)), dtype=dtype, **division)
        too_long = dtype == mx.float32 and tiling.machine == "metal" and tiling.chunk > 16
        if not too_long and tiling.chunk // 16 % tiling.split == 0 and tiling.fits:
            return tiling
    return None
