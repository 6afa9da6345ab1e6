"""Launches the fused kernels of ops/kernels: six a layer, three forward and three backward, for scalar gates."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..kernels.launch import Launch


def _padded(n: int) -> int:
    return (n + 15) // 16 * 16


def _aligned(n: int) -> int:
    return (n + 15) // 16 * 16


@dataclass(frozen=True)
class Plan:
    """Sizes of one call, and how a machine cuts it: `chunk` positions, `slice` rows of the state at a time."""

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    chunk: int
    slice: int
    exact_bytes: int
    gradient_groups: int
    masked: bool
    segmented: bool

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def slices(self) -> int:
        return -(-self.value_size // self.slice)

    @property
    def stride(self) -> int:
        return _padded(self.key_size) + 8

    @property
    def rows(self) -> int:
        """Bytes of one chunk of keys in shared memory."""
        return self.chunk * self.stride * self.exact_bytes

    @property
    def square(self) -> int:
        return self.chunk * (self.chunk + 8) * 4

    @property
    def thin(self) -> int:
        return self.chunk * (self.slice + 8) * 4

    @property
    def state(self) -> int:
        return self.slice * self.stride * 4

    @property
    def decay(self) -> int:
        return _aligned(self.chunk * (self.chunk + 1) * 4)

    def values(self, groups: int) -> dict:
        return {
            "In": self.dtype,
            "C": self.chunk,
            "DK": self.key_size,
            "DV": self.value_size,
            "SLICE": self.slice,
            "HK": self.key_heads,
            "HV": self.value_heads,
            "GROUPS": groups,
            "MASKED": self.masked,
            "SEGMENTED": self.segmented,
        }


@dataclass(frozen=True)
class Arguments:
    """The contract's inputs, with arrays in place of what was left out."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array
    initial: mx.array
    mask: mx.array
    segments: mx.array
    sizes: mx.array


_ALL = ("In", "C", "DK", "DV", "SLICE", "HK", "HV", "GROUPS", "MASKED", "SEGMENTED")
_SCAN = _ALL[:-1]


def _launch(name, memory, plan, inputs, outputs, blocks, size, order=_ALL, memory_order=None, groups=4) -> Launch:
    return Launch(
        name=f"gated_delta_{name}",
        memory=memory,
        inputs=inputs,
        outputs=outputs,
        values=plan.values(groups),
        order=order,
        memory_order=memory_order or ("In", "C", "DK", "SLICE"),
        blocks=blocks,
        bytes=size,
        groups=groups,
    )


def prepare(plan: Plan, x: Arguments) -> Launch:
    """inverse [B,Hv,chunks,C,C] and factors [B,Hv,chunks,2,C]."""
    shape = (plan.batch, plan.value_heads, plan.chunks)
    return _launch(
        "prepare",
        "PrepareMemory",
        plan,
        {"k": x.k, "log_g": x.log_g, "beta": x.beta, "mask": x.mask, "segments": x.segments, "sizes": x.sizes},
        {
            "inverse": ((*shape, plan.chunk, plan.chunk), mx.float32),
            "factors": ((*shape, 2, plan.chunk), mx.float32),
        },
        (plan.chunks, plan.value_heads, plan.batch),
        plan.rows + plan.decay + 2 * plan.square + 12 * plan.chunk,
        order=("In", "C", "DK", "HK", "HV", "GROUPS", "MASKED", "SEGMENTED"),
        memory_order=("In", "C", "DK"),
    )


def scan(plan: Plan, x: Arguments, inverse: mx.array, factors: mx.array) -> Launch:
    """states [B,Hv,chunks,Dv,Dk], delta [B,T,Hv,Dv] and last [B,Hv,Dv,Dk]."""
    heads = (plan.batch, plan.value_heads)
    inputs = {"k": x.k, "v": x.v, "beta": x.beta, "mask": x.mask, "initial": x.initial, "sizes": x.sizes}
    return _launch(
        "scan",
        "ScanMemory",
        plan,
        inputs | {"inverse": inverse, "factors": factors},
        {
            "states": ((*heads, plan.chunks, plan.value_size, plan.key_size), mx.float32),
            "delta": ((plan.batch, plan.length, plan.value_heads, plan.value_size), mx.float32),
            "last": ((*heads, plan.value_size, plan.key_size), mx.float32),
        },
        (plan.slices, plan.value_heads, plan.batch),
        plan.rows + plan.state + plan.square + 2 * plan.thin + 16 * plan.chunk,
        order=_SCAN,
    )


def output(plan: Plan, x: Arguments, factors: mx.array, states: mx.array, delta: mx.array) -> Launch:
    """y [B,T,Hv,Dv]."""
    inputs = {"q": x.q, "k": x.k, "log_g": x.log_g, "mask": x.mask, "segments": x.segments, "sizes": x.sizes}
    return _launch(
        "output",
        "OutputMemory",
        plan,
        inputs | {"factors": factors, "states": states, "delta": delta},
        {"y": (x.v.shape, plan.dtype)},
        (plan.chunks, plan.value_heads, plan.batch),
        plan.rows + max(plan.rows, plan.state) + max(plan.thin, plan.decay) + plan.square + 12 * plan.chunk,
    )


def local(plan: Plan, x: Arguments, dy: mx.array) -> Launch:
    """P^T dY, [B,T,Hv,Dv]."""
    inputs = {"q": x.q, "k": x.k, "log_g": x.log_g, "mask": x.mask, "segments": x.segments, "sizes": x.sizes}
    return _launch(
        "local",
        "LocalMemory",
        plan,
        inputs | {"dy": dy},
        {"d_delta": (x.v.shape, mx.float32)},
        (plan.chunks, plan.value_heads, plan.batch),
        2 * plan.rows + plan.decay + plan.square + 8 * plan.chunk,
    )


def reverse(plan: Plan, x: Arguments, inverse, factors, dy, d_last, d_delta) -> Launch:
    """d_states [B,Hv,chunks,Dv,Dk], d_right [B,T,Hv,Dv] and d_initial [B,Hv,Dv,Dk]."""
    heads = (plan.batch, plan.value_heads)
    inputs = {"q": x.q, "k": x.k, "beta": x.beta, "mask": x.mask, "sizes": x.sizes, "inverse": inverse}
    return _launch(
        "reverse",
        "ReverseMemory",
        plan,
        inputs | {"factors": factors, "dy": dy, "d_last": d_last, "local": d_delta},
        {
            "d_states": ((*heads, plan.chunks, plan.value_size, plan.key_size), mx.float32),
            "d_right": (x.v.shape, mx.float32),
            "d_initial": ((*heads, plan.value_size, plan.key_size), mx.float32),
        },
        (plan.slices, plan.value_heads, plan.batch),
        plan.rows + plan.state + max(plan.rows, plan.square) + 2 * plan.thin + 16 * plan.chunk,
        order=_SCAN,
    )


def gradients(plan: Plan, x: Arguments, factors, states, d_states, delta, d_right, dy) -> Launch:
    """dq, dk, dv, d_log_g and d_beta, in their inputs' shapes; the last two fp32."""
    across = _padded(plan.key_size) // 16
    slices = 2 * plan.state + 3 * plan.thin
    pairs = 2 * plan.rows + plan.square
    shared = max(plan.chunk * (plan.chunk + 1) * 4, 3 * plan.chunk * across * 4)
    scalars = (9 * plan.chunk + plan.chunk * (plan.chunk // 16) + 32) * 4
    inputs = {"q": x.q, "k": x.k, "v": x.v, "log_g": x.log_g, "beta": x.beta, "mask": x.mask, "segments": x.segments}
    return _launch(
        "gradients",
        "GradientMemory",
        plan,
        inputs
        | {"sizes": x.sizes, "factors": factors, "states": states, "d_states": d_states}
        | {"delta": delta, "d_right": d_right, "dy": dy},
        {
            "dq": (x.q.shape, plan.dtype),
            "dk": (x.k.shape, plan.dtype),
            "dv": (x.v.shape, plan.dtype),
            "d_log_g": (x.log_g.shape, mx.float32),
            "d_beta": (x.beta.shape, mx.float32),
        },
        (plan.chunks, plan.key_heads, plan.batch),
        max(slices, pairs) + _aligned(shared) + scalars,
        groups=plan.gradient_groups,
    )
