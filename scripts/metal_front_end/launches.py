"""The launches of every kernel that an Apple GPU runs, on calls of released models, recorded and not run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from deltatune.ops.attention.fused_op import attention_fused
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_of
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import Case


@dataclass(frozen=True)
class RecordedCall:
    """A call of one operator: its name in a table, the tokens of its row, and the launches of both passes in order."""

    name: str
    tokens: int
    launches: tuple[Launch, ...]


class _Recorder:
    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, launch: Launch) -> list[mx.array]:
        self.launches.append(launch)
        return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs.values()]


def of_gated_delta(
    dtype: mx.Dtype,
    size: int,
    heads: tuple[int, int] = (1, 1),
    *,
    tokens: int = 70,
    per_channel: bool = False,
    documents: bool = False,
) -> RecordedCall:
    """Record a call with one row; `documents` gives it segments and a mask."""
    key_heads, value_heads = heads
    q, v = mx.zeros((1, tokens, key_heads, size), dtype), mx.zeros((1, tokens, value_heads, size), dtype)
    log_g = mx.zeros(v.shape if per_channel else v.shape[:3])
    constants = {"segments": mx.zeros((1, tokens), mx.int32), "mask": mx.ones((1, tokens), mx.bool_)}
    recorder = _Recorder()

    def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return gated_delta_fused(
            *arrays, tiling_of_call=partial(tiling_of, "metal"), **(constants if documents else {})
        )

    state = mx.zeros((1, value_heads, size, size))
    with on(recorder):
        mx.vjp(call, [q, q, v, log_g, mx.zeros(v.shape[:3])], [v, state])
    kind = ", a gate a channel" if per_channel else ""
    words = f"gated delta, {_short(dtype)}, {key_heads}/{value_heads} heads of {size}{kind}"
    return RecordedCall(words + ", documents" * documents, tokens, tuple(recorder.launches))


def of_attention(
    dtype: mx.Dtype,
    size: int,
    heads: tuple[int, int] = (2, 1),
    *,
    tokens: int = 70,
    documents: bool = False,
    window: int | None = None,
    sinks: bool = False,
) -> RecordedCall:
    """Record a causal call with one row."""
    query_heads, key_heads = heads
    q, k = mx.zeros((1, query_heads, tokens, size), dtype), mx.zeros((1, key_heads, tokens, size), dtype)
    recorder = _Recorder()
    more = {
        "segments": mx.zeros((1, tokens), mx.int32) if documents else None,
        "window": window,
        "sinks": mx.zeros((query_heads,)) if sinks else None,
    }

    def call(*arrays: mx.array) -> list[mx.array]:
        return [attention_fused(*arrays, scale=1.0, machine="metal", **more)]

    with on(recorder):
        mx.vjp(call, [q, k, k], [q])
    words = f"attention, {_short(dtype)}, {query_heads}/{key_heads} heads of {size}"
    return RecordedCall(words + ", documents" * documents, tokens, tuple(recorder.launches))


def of_trial(case: Case) -> RecordedCall:
    """Record the trial of an operator that has kernels alone, such as those of decoding."""
    recorder = _Recorder()
    case.call(recorder)
    return RecordedCall(case.name, 1, tuple(recorder.launches))


def _short(dtype: mx.Dtype) -> str:
    return {mx.float32: "fp32", mx.bfloat16: "bf16", mx.float16: "fp16"}[dtype]
