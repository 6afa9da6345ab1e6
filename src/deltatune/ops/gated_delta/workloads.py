"""Calls of gated_delta at the sizes of released models, with their results in float64, for the self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..trial.case import Case
from ..trial.measure import relative_norm
from .call import Call
from .chunk import gated_delta_chunk
from .float64 import INPUTS, recurrence
from .naive import gated_delta_naive
from .tolerances import EASY, FUSED_NORM, SLOW, fused_bf16_norm
from .trial_case import (
    SLOW_TOKENS,
    Implementation,
    by_gates,
    differentiated,
    draw_log_gates,
    draw_segments,
    slow_name,
)

NAMES = ("y", "state", *INPUTS)
# q and k have key heads and all other arrays value heads; a state has its heads on the second axis.
_OF_KEYS, _STATES = ("q", "k"), ("state", "initial_state")


@dataclass(frozen=True)
class Workload:
    """The sizes and the kind of a call of gated_delta.

    Args:
        name: The workload's name.
        length: The number of tokens.
        key_heads: The number of heads of q and k.
        value_heads: The number of heads of v.
        head_size: The size of every head.
        dtype: The dtype of q, k and v.
        per_channel: Whether there is a gate per channel instead of one per head.
        documents: Whether the rows hold several documents and a mask, instead of one text.
        rows: The number of rows, of which the last has slow gates.
    """

    name: str
    length: int
    key_heads: int
    value_heads: int
    head_size: int = 128
    dtype: str = "float32"
    per_channel: bool = False
    documents: bool = False
    rows: int = 2

    def arrays(self) -> dict[str, Any]:
        """Draw the arguments in fp32, with gates of every kind; those that a model has in bf16 are rounded to it."""
        draw = np.random.default_rng(0)
        keys = (self.rows, self.length, self.key_heads, self.head_size)
        values = (self.rows, self.length, self.value_heads, self.head_size)
        k = draw.normal(size=keys)
        gates = values if self.per_channel else values[:3]
        floats: dict[str, np.ndarray] = {
            "q": draw.normal(size=keys) * self.head_size**-0.5,
            "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
            "v": draw.normal(size=values),
            "log_g": draw_log_gates(draw, gates),
            "beta": draw.uniform(0.05, 0.95, size=values[:3]),
            "initial_state": draw.normal(size=(self.rows, self.value_heads, self.head_size, self.head_size)),
            "dy": draw.normal(size=values),
        }
        floats["dstate"] = draw.normal(size=floats["initial_state"].shape)
        arrays: dict[str, Any] = {name: self._rounded(name, x) for name, x in floats.items()}
        arrays |= {"mask": None, "segments": None}
        if self.documents:
            mask = np.ones((self.rows, self.length), bool)
            mask[0, self.length // 3 : self.length // 2] = False
            arrays |= {"mask": mask, "segments": draw_segments(draw, self.rows, self.length)}
        return arrays

    def _rounded(self, name: str, x: np.ndarray) -> np.ndarray:
        exact = x.astype(np.float32)
        return np.array(mx.array(exact).astype(self.kind_of(name)).astype(mx.float32))

    def kind_of(self, name: str) -> mx.Dtype:
        """The dtype of the argument `name`; models have gates and states in fp32."""
        return getattr(mx, self.dtype) if name in ("q", "k", "v", "dy") else mx.float32

    def arguments(self, arrays: dict[str, Any]) -> tuple[list[mx.array], dict[str, Any], list[mx.array]]:
        """The arguments of trial_case.differentiated after the function, in the workload's dtypes."""
        constants = {name: None if arrays[name] is None else mx.array(arrays[name]) for name in ("mask", "segments")}
        floats = {name: mx.array(arrays[name]).astype(self.kind_of(name)) for name in (*INPUTS, "dy", "dstate")}
        return [floats[name] for name in INPUTS], constants, [floats["dy"], floats["dstate"]]

    def call(self) -> Call:
        """The call, for the choice of an implementation."""
        arrays = self.arrays()
        q, k, v, log_g = (mx.array(arrays[name]).astype(self.kind_of(name)) for name in ("q", "k", "v", "log_g"))
        return Call(q, k, v, log_g, self.documents, self.documents)

    def case(self, implementation: str) -> Case[Implementation]:
        """The case, with the bounds that hold for an implementation."""
        return case_of(self, bounds(self, implementation == "fused"))

    def corner(self, name: str, x: Any) -> Any:
        """The part of an array that belongs to the first and the last key head and to their value heads.

        Heads are independent of one another, so a comparison of these heads needs no others.
        """
        if x is None or name in ("mask", "segments"):
            return x
        heads = np.array(sorted({0, self.key_heads - 1}))
        if name not in _OF_KEYS:
            repeats = self.value_heads // self.key_heads
            heads = (heads[:, None] * repeats + np.arange(repeats)).reshape(-1)
        axis = 1 if name in (*_STATES, "dstate") else 2
        return mx.take(x, mx.array(heads), axis) if isinstance(x, mx.array) else np.take(x, heads, axis)


@dataclass(frozen=True)
class Truth:
    """The arguments of a workload, the exact results of the corner, and the errors there of a peer on the CPU."""

    arrays: dict[str, Any]
    exact: dict[str, np.ndarray]
    peers: dict[str, float]


@lru_cache(maxsize=1)
def truth_of(workload: Workload) -> Truth:
    """The truth of a workload, which its implementations share; the peer is `chunk`, and `naive` in bf16."""
    arrays = workload.arrays()
    few = {name: workload.corner(name, x) for name, x in arrays.items()}
    exact = recurrence(few, few["dy"], few["dstate"])
    peer = gated_delta_chunk if workload.dtype == "float32" else gated_delta_naive
    primals, constants, cotangents = workload.arguments(few)
    case = _case(workload, lambda function: differentiated(function, primals, constants, cotangents), exact, {})
    with mx.stream(mx.cpu):
        peers = case.errors(case.computed(peer), case.truth())
    return Truth(arrays, exact, peers)


def case_of(workload: Workload, allowed: dict[str, float]) -> Case[Implementation]:
    """The case of a workload, of which the corner is compared; `allowed` has the largest error of each result."""
    truth = truth_of(workload)
    primals, constants, cotangents = workload.arguments(truth.arrays)

    def call(function: Implementation) -> list[mx.array]:
        results = zip(NAMES, differentiated(function, primals, constants, cotangents), strict=True)
        return [_or_nan(workload.corner(name, x), mx.isfinite(x).all()) for name, x in results]

    return _case(workload, call, truth.exact, allowed, [*primals, *cotangents])


def _case(
    workload: Workload,
    call: Callable[[Implementation], list[mx.array]],
    exact: dict[str, np.ndarray],
    allowed: dict[str, float],
    like: Sequence[mx.array] = (),
) -> Case[Implementation]:
    truth = [exact[name] for name in NAMES]
    return Case(workload.name, NAMES, call, lambda: truth, 0.0, allowed, relative_norm, like=like, parts=by_gates)


def _or_nan(x: mx.array, finite: mx.array) -> mx.array:
    return mx.where(finite, x, mx.array(float("nan"), x.dtype))


def bounds(workload: Workload, fused: bool) -> dict[str, float]:
    """The largest error allowed for each result, from tolerances.py.

    fused: use the bounds of the fused kernels in fp32.
    """
    peers = truth_of(workload).peers
    if workload.dtype != "float32":
        return {name: fused_bf16_norm(peer) for name, peer in peers.items()}
    allowed = {name: max(FUSED_NORM, peers[name]) if fused else EASY for name in NAMES}
    return allowed | {slow_name(name): SLOW for name in NAMES}


def workloads(quick: bool) -> list[Workload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    length, size = (SLOW_TOKENS + 6, 16 if quick else 128)
    few = 2 if quick else 16
    return [
        Workload("scalar gates, bf16", length, few, 2 * few, size, "bfloat16"),
        Workload("scalar gates, fp32, masked documents", length, few, few, size, documents=True),
        Workload("gates per channel, bf16", length, 2 * few, 2 * few, size, "bfloat16", per_channel=True),
        Workload("gates per channel, fp32, masked documents", length, few, few, size, "float32", True, True),
    ]
