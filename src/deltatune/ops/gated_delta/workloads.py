"""Calls at the sizes of released models, and their results in float64, for doctor and self-test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..operator.case import Case, judged
from ..operator.measure import relative_norm
from ..operator.verdicts import Verdict
from .chunk import gated_delta_chunk
from .float64 import recurrence
from .naive import gated_delta_naive
from .tolerances import BF16_NORM, EASY, FUSED_NORM, PRODUCTS_IN_BF16, SLOW, fused_bf16_norm
from .trial_case import (
    LENGTH,
    Arguments,
    Call,
    Implementation,
    ShapeClass,
    differentiated,
    implementation_of,
    slow_name,
    trial_case,
)


@dataclass(frozen=True)
class Workload:
    """A class of calls, of two rows of `length` tokens, of which the last has slow gates."""

    name: str
    shape: ShapeClass
    length: int = LENGTH

    def call(self) -> Call:
        """The call, for the choice of an implementation."""
        return Call.of_class(self.shape)

    def case(self, implementation: str) -> Case[Implementation]:
        """The case, with the bounds that hold for an implementation."""
        return self.case_within(self.bounds(implementation))

    def case_within(self, bounds: dict[str, float]) -> Case[Implementation]:
        """The case, of which each result may be off by its bound."""
        case = trial_case(self.shape, length=self.length)
        exact = Arguments.drawn(self.shape, self.length).with_all_heads(truth_of(self).exact)
        return replace(case, name=self.name, truth=lambda: exact, bound=0.0, bounds=bounds, error=relative_norm)

    def bounds(self, implementation: str) -> dict[str, float]:
        """The largest error allowed for each result of an implementation, from tolerances.py."""
        peers = truth_of(self).peers
        if implementation == "chunk_bf16":
            return dict.fromkeys(peers, PRODUCTS_IN_BF16 * BF16_NORM)
        if self.shape.dtype != "float32":
            return {name: fused_bf16_norm(peer) for name, peer in peers.items()}
        names = self.shape.results
        allowed = {name: max(FUSED_NORM, peers[name]) if implementation == "fused" else EASY for name in names}
        return allowed | {slow_name(name): SLOW for name in names}


@dataclass(frozen=True)
class Truth:
    """The exact results of the reference's heads, and the errors there of a peer on the CPU."""

    exact: list[np.ndarray]
    peers: dict[str, float]


@lru_cache(maxsize=1)
def truth_of(workload: Workload) -> Truth:
    """The truth of a workload, which its implementations share; the peer is `chunk`, and `naive` in bf16."""
    shape = workload.shape
    drawn = Arguments.drawn(shape, workload.length)
    floats = dict(zip(shape.floats, map(np.array, drawn.reference_primals), strict=True))
    constants = {name: None if x is None else np.array(x) for name, x in drawn.constants.items()}
    results = recurrence(floats | constants, *map(np.array, drawn.reference_cotangents))
    exact = [results[name] for name in ("y", "state", *shape.floats)]
    peer = implementation_of(shape, gated_delta_chunk if shape.dtype == "float32" else gated_delta_naive)
    both = (drawn.reference_primals, drawn.primals), (drawn.reference_cotangents, drawn.cotangents)
    primals, cotangents = ([few.astype(x.dtype) for few, x in zip(*pair, strict=True)] for pair in both)
    with mx.stream(mx.cpu):
        case = replace(trial_case(shape, length=workload.length), error=relative_norm)
        peers = case.errors(differentiated(peer, primals, drawn.constants, cotangents), exact)
    return Truth(exact, peers)


def workloads(quick: bool) -> list[Workload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    few, size = (2, 16) if quick else (16, 128)
    documents = ShapeClass(few, few, size, size, "float32", masked=True, segmented=True)
    return [
        Workload("scalar gates, bf16", ShapeClass(few, 2 * few, size, size, "bfloat16")),
        Workload("scalar gates, fp32, masked documents", documents),
        Workload("gates per channel, bf16", ShapeClass(2 * few, 2 * few, size, size, "bfloat16", per_channel=True)),
        Workload("gates per channel, fp32, masked documents", replace(documents, per_channel=True)),
    ]


# Small sizes, on which the recurrence takes little time.
SMALL = (
    ShapeClass(2, 4, 64, 64, "float32"),
    ShapeClass(2, 4, 64, 64, "bfloat16", masked=True, segmented=True),
    ShapeClass(2, 2, 32, 32, "float32", per_channel=True),
)
# Sizes of released models; in fp32 the heads are half as wide, for which an NVIDIA GPU's kernels compile in a tenth of
# the time.
MODELS = (
    ShapeClass(16, 16, 128, 128, "bfloat16"),
    ShapeClass(16, 32, 128, 128, "bfloat16", segmented=True),
    ShapeClass(16, 16, 64, 64, "float32", masked=True),
    ShapeClass(32, 32, 128, 128, "bfloat16", per_channel=True),
)


def calls(shapes: Sequence[ShapeClass] = ()) -> list[Call]:
    """Return a call of each class of MODELS, or of other classes, with one token."""
    return [Call.of_class(shape) for shape in shapes or MODELS]


def compare_chunk(shapes: Sequence[ShapeClass] = ()) -> list[Verdict]:
    """Compare `chunk` with the recurrence, on SMALL or other classes."""

    def verdict(shape: ShapeClass) -> Verdict:
        case = trial_case(shape, by_recurrence=True)
        return judged(case, implementation_of(shape, gated_delta_chunk), "chunk")

    return [verdict(shape) for shape in shapes or SMALL]
