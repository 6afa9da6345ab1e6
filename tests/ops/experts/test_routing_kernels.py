"""The kernels that MLX compiles for routers are compiled beforehand, each by a process of its own."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from deltatune.machine import backend, nvidia
from deltatune.ops.experts import block, routing_kernels
from deltatune.ops.experts.projection import Projection
from deltatune.ops.functional import as_list
from deltatune.ops.tracing.trace import Foreseen
from deltatune.ops.trial.foresight import look_ahead

KERNELS = {
    "chosen": "GatherAxis",
    "gradients": "ScatterAxis",
    "experts": "Gather",
    "rows": "ScatterAxis",
    "scores": "Gather",
    "sums": "Gather",
}


@pytest.mark.parametrize("case", routing_kernels.CASES)
def test_a_process_computes_one_of_them(case):
    text = io.StringIO()
    mx.export_to_dot(text, *as_list(routing_kernels.computed(case, mx.bfloat16, mx.uint32)))
    operations = re.findall(r'label ?= ?"(\w+)', text.getvalue())
    assert [operation for operation in operations if operation in KERNELS.values()] == [KERNELS[case]]


@pytest.mark.parametrize(("free", "starts"), [(20e9, True), (2e9, False), (None, False)])
def test_a_block_that_is_foreseen_starts_them_once_where_there_is_room(monkeypatch, free, starts):
    started: list[Any] = []
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(nvidia, "free_memory", lambda: free)
    monkeypatch.setattr(routing_kernels, "MlxBuild", lambda *arguments: started.append(arguments))
    x, weight = mx.zeros((6, 16), mx.bfloat16), mx.zeros((4, 16, 16), mx.bfloat16)
    indices, scores = mx.zeros((6, 2), mx.uint32), mx.zeros((6, 2), mx.bfloat16)

    def calls() -> None:
        for given in (scores, scores, None):
            block.expert_block(x, indices, given, Projection(weight), Projection(weight), Projection(weight))

    with ThreadPoolExecutor(1) as builders:
        look_ahead(calls, builders, Foreseen(processes=[]))
    module = "deltatune.ops.experts.routing_kernels"
    assert started == [(module, case, "bfloat16", "uint32") for case in KERNELS if starts]
