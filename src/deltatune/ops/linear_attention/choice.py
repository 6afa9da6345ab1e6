"""Chooses the implementation of linear_attention that serves a call: those of gated_delta, without beta."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from .. import IMPLEMENTATIONS
from ..gated_delta import trial_case
from ..gated_delta.choice import OPERATOR as GATED_DELTA
from ..gated_delta.trial_case import ShapeClass, Workload

# Small sizes, on which the recurrence takes little time.
SMALL = (
    ShapeClass(2, 4, 32, 16, "float32", beta=""),
    ShapeClass(1, 2, 16, 32, "bfloat16", masked=True, segmented=True, per_channel=True, beta=""),
)
# Sizes of released models: Nemotron-H and Nemotron 3, Granite 4, Falcon-H1; and a gate a channel.
MODELS = (
    ShapeClass(8, 64, 128, 64, "bfloat16", beta=""),
    ShapeClass(1, 48, 128, 64, "bfloat16", segmented=True, beta=""),
    ShapeClass(1, 24, 256, 64, "bfloat16", beta=""),
    ShapeClass(16, 16, 64, 64, "float32", masked=True, beta=""),
    ShapeClass(16, 16, 128, 128, "bfloat16", per_channel=True, beta=""),
)


def workloads_of(quick: bool) -> list[Workload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    heads, key_size, value_size = (4, 16, 8) if quick else (32, 128, 64)
    documents = ShapeClass(2, heads, key_size, value_size, "float32", masked=True, segmented=True, beta="")
    per_channel = replace(documents, key_heads=heads, per_channel=True)
    return [
        Workload("linear attention, bf16", ShapeClass(2, heads, key_size, value_size, "bfloat16", beta="")),
        Workload("linear attention, fp32, masked documents", documents),
        Workload("linear attention, gates per channel, fp32, masked documents", per_channel),
    ]


OPERATOR = replace(
    GATED_DELTA,
    name="linear_attention",
    implementations=IMPLEMENTATIONS["linear_attention"],
    orders=GATED_DELTA.orders | {"metal": ("fused", "chunk_bf16", "chunk")},
    candidates={name: GATED_DELTA.candidates[name] for name in IMPLEMENTATIONS["linear_attention"]},
    examples=partial(trial_case.calls, MODELS),
    compare_last=partial(trial_case.compare_chunk, SMALL),
    workloads=workloads_of,
)
