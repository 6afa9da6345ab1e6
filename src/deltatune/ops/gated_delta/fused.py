"""Launches the fused kernels of ops/kernels: four a layer for scalar gates, two forward and two backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import mlx.core as mx

from ...machine import nvidia
from ..kernels.launch import Launch

# What one block may hold in threadgroup memory on Metal.
METAL_BYTES = 32 * 1024
# Of a key that the Metal plans take: the contract's, and what a scan's registers are cut for.
WIDEST = 256
# Blocks that fill a large GPU: a scan with fewer takes thinner slices of the state.
_FULL = 64


def _padded(n: int) -> int:
    return (n + 15) // 16 * 16


@dataclass(frozen=True)
class Tiling:
    """Sizes of one call, and how a machine cuts it.

    `chunk` positions at a time; the scans give a block `slice` rows of the state, and every 16 of them to `split`
    groups, while `loaders` groups more bring the next chunk; the gradients read `gradient_slice` rows at a time;
    `stages` of a pipeline in shared memory; `overlay`: q and k come only after the slices, where memory is short;
    `far`: matrices as wide as a key stay in device memory and are read there (Metal alone).
    """

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    machine: str
    chunk: int
    slice: int
    split: int
    loaders: int
    gradient_slice: int
    gradient_groups: int
    stages: int
    overlay: bool
    far: bool
    masked: bool
    segmented: bool

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def exact_bytes(self) -> int:
        """Of an input's element in shared memory: fp16 stands as a pair of bf16 on CUDA."""
        return 4 if self.machine == "cuda" and self.dtype == mx.float16 else self.dtype.size

    @property
    def saved(self) -> mx.Dtype:
        """How states and their gradients are kept between kernels."""
        return mx.bfloat16 if self.dtype == mx.bfloat16 else mx.float32

    def room(self, rows: int, size: int) -> int:
        """Bytes of so many rows as wide as a key, in shared memory."""
        return 0 if self.far else rows * (_padded(self.key_size) + 8) * size

    @property
    def keys(self) -> int:
        return self.room(self.chunk, self.exact_bytes)

    @property
    def square(self) -> int:
        return self.chunk * (self.chunk + 8)

    @property
    def packed(self) -> int:
        """Elements of a lower triangle of 16 x 16 tiles, with its padding."""
        tiles = self.chunk // 16
        return 128 * tiles * (tiles + 2)

    @property
    def decay(self) -> int:
        return _padded(4 * (self.chunk * 19 + self.chunk // 16))

    @cached_property
    def prepare_bytes(self) -> int:
        tops = max(2 * self.keys, 4 * (self.packed + self.square))
        return tops + 4 * self.square + 76 * self.chunk + self.decay + 16

    @property
    def staging(self) -> int:
        """Bytes of a strip's tiles on their way out of a scan, and between its groups."""
        if self.split > 1:
            return self._rooms
        if self.machine == "metal" or self.dtype == mx.float32:
            return 0
        saved = 2 if self.dtype == mx.bfloat16 else 4
        return 16 * max(saved * (_padded(self.key_size) + 8), 4 * (self.chunk + 8))

    @property
    def _rooms(self) -> int:
        saved, state, square = self.saved.size, 16 * (_padded(self.key_size) + 8), 16 * (self.chunk + 8)
        return max(saved * state + 16 * square, 4 * state + 12 * square)

    @property
    def scan_groups(self) -> int:
        return self.slice // 16 * self.split + self.loaders

    @cached_property
    def scan_bytes(self) -> int:
        thin = self.chunk * (self.slice + 8) * self.exact_bytes
        stage = 2 * self.keys + 8 * self.packed + thin + 12 * self.chunk
        return self.stages * stage + self.slice // 16 * self.staging + 16

    @cached_property
    def gradient_bytes(self) -> int:
        c, rows, saved = self.chunk, self.gradient_slice, self.saved.size
        stage = 2 * self.room(rows, saved) + rows * (c + 8) * 8
        stage += c * (rows + 8) * self.exact_bytes
        pairs = 2 * self.keys + self.square * 8
        slices = (0 if self.overlay else 2 * self.keys) + self.stages * stage
        return max(pairs, slices) + 68 * c + self.decay + 16 * c + 8 * c * (c // 16) + 48 * c + 144

    @property
    def most(self) -> int:
        """Bytes of shared memory that a block may have."""
        return METAL_BYTES if self.machine == "metal" else nvidia.limits().block_bytes

    @property
    def fits(self) -> bool:
        return max(self.prepare_bytes, self.scan_bytes, self.gradient_bytes) <= self.most


def _scan_cut(heads: int, key_size: int, value_size: int, dtype: mx.Dtype) -> tuple[int, int, int]:
    """Rows of the state a block of a CUDA scan takes, groups a strip of 16 rows, and groups that load."""
    tall = _padded(value_size)
    if dtype == mx.bfloat16:
        # Measured on an H200 (docs/log.md): thin blocks where all of them run at once.
        split = 2 if _padded(key_size) % 32 == 0 else 1
        for size, groups in ((32, split), (64, 1)):
            if size <= max(32, tall) and heads * -(-value_size // size) <= nvidia.limits().multiprocessors:
                return size, groups, 1
    sizes = [size for size in (128, 64, 32) if size <= max(32, tall)]
    size = next((size for size in sizes if heads * -(-value_size // size) >= _FULL), sizes[-1])
    return size, 1, 0


@lru_cache(maxsize=256)
def plan(
    machine: str,
    shape: tuple[int, int, int, int, int, int],
    dtype: mx.Dtype,
    *,
    masked: bool,
    segmented: bool,
) -> Tiling | None:
    """How `machine` (metal or cuda) cuts a call of shape (B, T, Hk, Hv, Dk, Dv); None where memory cannot hold it."""
    batch, _, _, value_heads, key_size, value_size = shape
    tall = _padded(value_size)
    whole = [rows for rows in (64, 32, 16) if tall % rows == 0]
    if machine == "metal":
        cuts = [(chunk, (16 * groups, 1, 0), 16, 1, True, False) for chunk in (32, 16) for groups in (2, 1)]
        cuts += [(16, (32, 1, 0), 16, 1, True, True)] * (key_size <= WIDEST)
    else:
        scans = [_scan_cut(batch * value_heads, key_size, value_size, dtype), (32, 1, 0)]
        chunks = (64, 32) if dtype == mx.bfloat16 and key_size <= 128 else (32, 16)
        cuts = [(c, scan, rows, 2, False, False) for c in chunks for scan in scans for rows in whole[:2]]
        cuts += [(16, (32, 1, 0), rows, stages, stages == 1, False) for rows in whole for stages in (2, 1)]
    for chunk, (rows, split, loaders), gradient_rows, stages, overlay, far in cuts:
        if (dtype == mx.float32 and machine == "metal" and chunk > 16) or chunk // 16 % split:
            continue
        groups = chunk // 16 * (2 if chunk == 64 else 4)
        cut = (chunk, rows, split, loaders, gradient_rows, groups, stages, overlay, far)
        made = Tiling(*(*shape, dtype, machine, *cut, masked, segmented))
        if made.fits:
            return made
    return None


@dataclass(frozen=True)
class KernelInputs:
    """The contract's inputs; `initial` is `no_state()` where there is none."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array
    initial: mx.array
    mask: mx.array | None
    segments: mx.array | None

    def named(self, *names: str) -> dict[str, mx.array]:
        """Those of `names` that are there."""
        return {name: array for name in names if (array := getattr(self, name)) is not None}


@cache
def no_state() -> mx.array:
    """Tells a scan to start from zeros: no state has heads of 1. Eight elements, as Metal's device memory wants."""
    return mx.array([[[[0.0]]]] * 8, dtype=mx.float32)


_BASE = ("In", "C", "DK", "DV", "SLICE", "HK", "HV", "GROUPS", "STAGES")


# What stands in a call of a body for what a call of gated_delta leaves out, and beside what needs more.
_ABSENT = "Nothing{}"
_STARTED = "initial_shape[3] == DK"


@lru_cache(maxsize=256)
def _values(plan: Tiling, order: tuple[str, ...], groups: int, rows: int | None) -> dict[str, int | bool | mx.Dtype]:
    values: dict[str, int | bool | mx.Dtype] = {
        "In": plan.dtype,
        "C": plan.chunk,
        "DK": plan.key_size,
        "DV": plan.value_size,
        "SLICE": rows or plan.slice,
        "HK": plan.key_heads,
        "HV": plan.value_heads,
        "GROUPS": groups,
        "STAGES": plan.stages,
        "SPLIT": plan.split,
        "OVERLAY": plan.overlay,
        "FAR": plan.far,
        "MASKED": plan.masked,
        "SEGMENTED": plan.segmented,
    }
    return {name: value for name, value in values.items() if name in order}


@cache
def _arguments(names: tuple[str, ...], given: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments of a body whose parameters are `names`, where `given` are there, and then the outputs."""
    texts = {name: (name if name in given else _ABSENT) for name in names}
    if "initial" in texts:
        texts["initial"] += f", {_STARTED}"
    return (*texts.values(), *outputs)


def _launch(name, memory, plan, names, inputs, outputs, blocks, size, groups, order, memory_order, rows=None) -> Launch:
    """`names`: the body's arguments before its outputs; those that `inputs` lacks were left out."""
    return Launch(
        name=f"gated_delta_{name}",
        memory=memory,
        inputs=inputs,
        outputs=outputs,
        values=_values(plan, order, groups, rows),
        order=order,
        memory_order=memory_order,
        blocks=blocks,
        bytes=size,
        groups=groups,
        arguments=_arguments(names, tuple(inputs), tuple(outputs)),
    )


def prepare(plan: Tiling, x: KernelInputs) -> Launch:
    """solve and scores, packed triangles a chunk, and factors [B,Hv,chunks,3,C]."""
    shape = (plan.batch, plan.value_heads, plan.chunks)
    names = ("q", "k", "log_g", "beta", "mask", "segments")
    triangle = ((*shape, plan.packed), mx.float32)
    return _launch(
        "prepare",
        "PrepareMemory",
        plan,
        names,
        x.named(*names),
        {"solve": triangle, "scores": triangle, "factors": ((*shape, 3, plan.chunk), mx.float32)},
        (plan.chunks, plan.value_heads, plan.batch),
        plan.prepare_bytes,
        groups=4,
        order=("In", "C", "DK", "HK", "HV", "GROUPS", "FAR", "MASKED", "SEGMENTED"),
        memory_order=("In", "C", "DK", "FAR"),
    )


def _scan(name, plan: Tiling, names, inputs, outputs) -> Launch:
    return _launch(
        name,
        "ScanMemory",
        plan,
        names,
        inputs,
        outputs,
        (-(-plan.value_size // plan.slice), plan.value_heads, plan.batch),
        plan.scan_bytes,
        groups=plan.scan_groups,
        order=(*_BASE, "SPLIT", "FAR", "MASKED"),
        memory_order=("In", "C", "DK", "SLICE", "STAGES", "SPLIT", "FAR"),
    )


def scan(plan: Tiling, x: KernelInputs, solve: mx.array, scores: mx.array, factors: mx.array) -> Launch:
    """y [B,T,Hv,Dv], states and u as the kernels keep them, a block a chunk, and last [B,Hv,Dv,Dk]."""
    heads, tall = (plan.batch, plan.value_heads), _padded(plan.value_size)
    names = ("q", "k", "v", "mask", "initial", "solve", "scores", "factors")
    inputs = x.named(*names[:5]) | {"solve": solve, "scores": scores, "factors": factors}
    outputs = {
        "y": (x.v.shape, plan.dtype),
        "states": ((*heads, plan.chunks, tall, _padded(plan.key_size) + 8), plan.saved),
        "u": ((*heads, plan.chunks, tall, plan.chunk + 8), mx.float32),
        "last": ((*heads, plan.value_size, plan.key_size), mx.float32),
    }
    return _scan("scan", plan, names, inputs, outputs)


def reverse(plan: Tiling, x: KernelInputs, solve, scores, factors, dy, d_last) -> Launch:
    """d_states and d_right as the kernels keep them, dv [B,T,Hv,Dv] and d_initial [B,Hv,Dv,Dk]."""
    heads, tall = (plan.batch, plan.value_heads), _padded(plan.value_size)
    names = ("q", "k", "dy", "mask", "d_last", "solve", "scores", "factors")
    inputs = x.named("q", "k", "mask") | {"dy": dy, "d_last": d_last}
    inputs |= {"solve": solve, "scores": scores, "factors": factors}
    outputs = {
        "d_states": ((*heads, plan.chunks, tall, _padded(plan.key_size) + 8), plan.saved),
        "d_right": ((*heads, plan.chunks, tall, plan.chunk + 8), mx.float32),
        "dv": (x.v.shape, plan.dtype),
        "d_initial": ((*heads, plan.value_size, plan.key_size), mx.float32),
    }
    return _scan("reverse", plan, names, inputs, outputs)


def gradients(plan: Tiling, x: KernelInputs, factors, states, d_states, u, d_right, dy) -> Launch:
    """dq, dk, d_log_g and d_beta, in their inputs' shapes; the last two fp32."""
    names = ("q", "k", "log_g", "mask", "segments")
    return _launch(
        "gradients",
        "GradientMemory",
        plan,
        (*names, "factors", "states", "d_states", "u", "d_right", "dy"),
        x.named(*names)
        | {"factors": factors, "states": states, "d_states": d_states, "u": u, "d_right": d_right, "dy": dy},
        {
            "dq": (x.q.shape, plan.dtype),
            "dk": (x.k.shape, plan.dtype),
            "d_log_g": (x.log_g.shape, mx.float32),
            "d_beta": (x.beta.shape, mx.float32),
        },
        (plan.chunks, plan.key_heads, plan.batch),
        plan.gradient_bytes,
        groups=plan.gradient_groups,
        order=(*_BASE, "OVERLAY", "FAR", "MASKED", "SEGMENTED"),
        memory_order=("In", "C", "DK", "SLICE", "STAGES", "OVERLAY", "FAR"),
        rows=plan.gradient_slice,
    )
