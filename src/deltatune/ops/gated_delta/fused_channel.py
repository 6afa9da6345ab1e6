"""Launches the fused kernels for a gate per key channel: four a layer, two forward and two backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import mlx.core as mx

from ..kernels.launch import Launch
from .fused import WIDEST, KernelInputs, Tiling, _launch, _padded

# Channels whose products with the states are in shared memory together, where a plan is far.
_SPAN = 128
# Blocks that fill a large GPU, as in fused.py.
_FULL = 64
_SCAN_MEMORY = ("In", "C", "DK", "SLICE", "STAGES", "SPLIT", "FAR")
_BASE = ("In", "C", "DK", "DV", "SLICE", "HK", "HV", "GROUPS", "STAGES")


@dataclass(frozen=True)
class ChannelTiling(Tiling):
    """As Tiling; chunks have one or two tiles of 16 positions, and the reverse scan may hold fewer rows of a state."""

    @property
    def wide(self) -> int:
        """Bytes of one chunk of scaled keys, in full precision."""
        return self.room(self.chunk, 4)

    @property
    def upper(self) -> int:
        """The same as rough products read them: the high plane alone, for bf16 on CUDA."""
        return self.wide // 2 if self.machine == "cuda" and self.dtype == mx.bfloat16 else self.wide

    @property
    def scaled_queries(self) -> int:
        return self.room(self.chunk, self.saved.size)

    @property
    def across(self) -> int:
        """Bytes of prefix q, prefix k and suffix k, which pairs of two tiles need."""
        return 3 * 16 * (_padded(self.key_size) + 8) * 4 * (self.chunk // 16 - 1)

    @cached_property
    def prepare_bytes(self) -> int:
        gates = 4 * self.chunk * _padded(self.key_size)
        solve = 4 * self.packed + 8 * self.square
        return 2 * self.keys + gates + self.across + solve + 2 * 68 * self.chunk + 4 * self.chunk + 16

    def _scan_bytes(self, keys: int) -> int:
        thin = self.chunk * (self.slice + 8) * self.exact_bytes
        numbers = 4 * (self.chunk + _padded(self.key_size))
        stage = keys + self.scaled_queries + self.wide + 8 * self.packed + thin + numbers
        return self.stages * stage + self.slice // 16 * self.staging + 16

    @cached_property
    def scan_bytes(self) -> int:
        return self._scan_bytes(self.upper)

    @cached_property
    def reverse_bytes(self) -> int:
        return self._scan_bytes(self.wide)

    @cached_property
    def gradient_bytes(self) -> int:
        c, rows, saved, width = self.chunk, self.gradient_slice, self.saved.size, _padded(self.key_size)
        stage = 2 * self.room(rows, saved) + rows * (c + 8) * 8 + c * (rows + 8) * self.exact_bytes
        two, span = c // 16 - 1, _SPAN if self.far else width
        products = 3 * (c + 16 * two) * (span + 4) * 4
        pairs, by_channel = 2 * 16 * 24 * 4 * two, (8 if self.far else 20) * width
        return max(self.stages * stage, products) + self.across + pairs + 2 * 68 * c + 20 * c + by_channel + 16

    @property
    def fits(self) -> bool:
        return super().fits and self.reverse_bytes <= self.most


@lru_cache(maxsize=256)
def plan(
    machine: str,
    shape: tuple[int, int, int, int, int, int],
    dtype: mx.Dtype,
    *,
    masked: bool,
    segmented: bool,
) -> ChannelTiling | None:
    """As fused.plan, for gates a channel."""
    batch, _, _, value_heads, key_size, value_size = shape
    tall = _padded(value_size)
    whole = [rows for rows in (64, 32, 16) if tall % rows == 0]
    if machine == "metal":
        cuts = [(chunk, 16 * groups, 16, 1, False) for chunk in (32, 16) for groups in (2, 1)]
        cuts += [(16, 32, 16, 1, True)] * (key_size <= WIDEST)
    else:
        slices = [size for size in (128, 64, 32) if size <= max(32, tall)]
        full = [size for size in slices if batch * value_heads * -(-value_size // size) >= _FULL] or slices[-1:]
        cuts = [(c, s, rows, 2, False) for c in (32, 16) for s in (full[0], 64, 32, 16) for rows in whole]
        cuts += [(16, 16, rows, 1, False) for rows in whole]
    for chunk, rows, gradient_rows, stages, far in cuts:
        if dtype == mx.float32 and machine == "metal" and chunk > 16:
            continue
        groups = 8 if chunk == 32 else 4
        cut = (chunk, rows, 1, 0, gradient_rows, groups, stages, stages == 1, far)
        made = ChannelTiling(*(*shape, dtype, machine, *cut, masked, segmented))
        if made.fits:
            return made
    return None


def prepare(plan: ChannelTiling, x: KernelInputs) -> Launch:
    """solve, scores and factors, and blocks of G Q, G K and E K, as the kernels keep them."""
    shape = (plan.batch, plan.value_heads, plan.chunks)
    width = _padded(plan.key_size)
    names = ("q", "k", "log_g", "beta", "mask", "segments")
    triangle = ((*shape, plan.packed), mx.float32)
    block = (*shape, plan.chunk, width + 8)
    return _launch(
        "channel_prepare",
        "ChannelPrepareMemory",
        plan,
        names,
        x.named(*names),
        {
            "solve": triangle,
            "scores": triangle,
            "factors": ((*shape, plan.chunk + width), mx.float32),
            "queries": (block, plan.saved),
            "keys": (block, mx.float32),
            "ends": (block, mx.float32),
        },
        (plan.chunks, plan.value_heads, plan.batch),
        plan.prepare_bytes,
        groups=4,
        order=("In", "C", "DK", "HK", "HV", "GROUPS", "FAR", "MASKED", "SEGMENTED"),
        memory_order=("In", "C", "DK", "FAR"),
    )


_BLOCKS = ("queries", "keys", "ends")
_PREPARED = ("solve", "scores", "factors")


def _scan(name: str, plan: ChannelTiling, names, inputs, outputs, size: int) -> Launch:
    return _launch(
        name,
        "ScanMemory",
        plan,
        names,
        inputs,
        outputs,
        (-(-plan.value_size // plan.slice), plan.value_heads, plan.batch),
        size,
        groups=plan.scan_groups,
        order=(*_BASE, "SPLIT", "FAR", "MASKED"),
        memory_order=(*_SCAN_MEMORY, "true", "true" if "reverse" in name else "false"),
    )


def scan(plan: ChannelTiling, x: KernelInputs, solve, scores, factors, queries, keys, ends) -> Launch:
    """y [B,T,Hv,Dv], states and u as the kernels keep them, and last [B,Hv,Dv,Dk]."""
    heads, tall = (plan.batch, plan.value_heads), _padded(plan.value_size)
    names = ("v", "mask", *_BLOCKS, "initial", *_PREPARED)
    inputs = x.named("v", "mask", "initial") | {"queries": queries, "keys": keys, "ends": ends}
    outputs = {
        "y": (x.v.shape, plan.dtype),
        "states": ((*heads, plan.chunks, tall, _padded(plan.key_size) + 8), plan.saved),
        "u": ((*heads, plan.chunks, tall, plan.chunk + 8), mx.float32),
        "last": ((*heads, plan.value_size, plan.key_size), mx.float32),
    }
    inputs |= {"solve": solve, "scores": scores, "factors": factors}
    return _scan("channel_scan", plan, names, inputs, outputs, plan.scan_bytes)


def reverse(plan: ChannelTiling, x: KernelInputs, solve, scores, factors, queries, keys, ends, dy, d_last) -> Launch:
    """d_states and d_right as the kernels keep them, dv [B,T,Hv,Dv] and d_initial [B,Hv,Dv,Dk]."""
    heads, tall = (plan.batch, plan.value_heads), _padded(plan.value_size)
    names = ("dy", "mask", *_BLOCKS, "d_last", *_PREPARED)
    inputs = x.named("mask") | {"dy": dy, "queries": queries, "keys": keys, "ends": ends, "d_last": d_last}
    outputs = {
        "d_states": ((*heads, plan.chunks, tall, _padded(plan.key_size) + 8), plan.saved),
        "d_right": ((*heads, plan.chunks, tall, plan.chunk + 8), mx.float32),
        "dv": (x.v.shape, plan.dtype),
        "d_initial": ((*heads, plan.value_size, plan.key_size), mx.float32),
    }
    inputs |= {"solve": solve, "scores": scores, "factors": factors}
    return _scan("channel_reverse", plan, names, inputs, outputs, plan.reverse_bytes)


def gradients(plan: ChannelTiling, x: KernelInputs, factors, states, d_states, u, d_right, dy) -> Launch:
    """dq, dk, d_log_g and d_beta, in their inputs' shapes; the last two fp32."""
    names = ("q", "k", "log_g", "mask", "segments")
    return _launch(
        "channel_gradients",
        "ChannelGradientMemory",
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
        order=(*_BASE, "FAR", "MASKED", "SEGMENTED"),
        memory_order=("In", "C", "DK", "SLICE", "STAGES", "FAR"),
        rows=plan.gradient_slice,
    )
