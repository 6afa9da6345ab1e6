"""Each implementation of gated_delta against the recurrence in float64, at the sizes of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..machine import backend
from ..ops.gated_delta import choice, gated_delta_chunk, gated_delta_naive, machine_trial
from ..ops.gated_delta.machine_trial import Implementation
from ..ops.gated_delta.tolerances import EASY, FUSED_NORM, fused_bf16_norm
from .float64_recurrence import INPUTS, recurrence
from .measure import poison, relative_norm, wide
from .outcome import FAILED, NOT_RUN, Check, Outcome, judged, not_run

NAMES = ("y", "state", *INPUTS)
# By head: q and k have key heads, the rest have value heads; a state has its heads on the second axis.
_OF_KEYS, _STATES = ("q", "k"), ("state", "initial_state")


@dataclass(frozen=True)
class Workload:
    """A call of gated_delta: its sizes, its dtype, one gate per head or per channel, masked documents or one text."""

    name: str
    length: int
    key_heads: int
    value_heads: int
    head_size: int = 128
    dtype: str = "float32"
    per_channel: bool = False
    documents: bool = False

    def arrays(self) -> dict[str, Any]:
        """fp32 arguments; in bf16, those that a model hands over in bf16 are rounded to it. Some gates are 0."""
        draw = np.random.default_rng(0)
        keys = (1, self.length, self.key_heads, self.head_size)
        values = (1, self.length, self.value_heads, self.head_size)
        k = draw.normal(size=keys)
        gates = values if self.per_channel else values[:3]
        kind = draw.uniform(size=gates)
        usual = -np.exp(1.5 * draw.normal(size=gates) - 2.0)
        floats: dict[str, np.ndarray] = {
            "q": draw.normal(size=keys) * self.head_size**-0.5,
            "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
            "v": draw.normal(size=values),
            "log_g": np.select([kind < 0.02, kind < 0.05, kind < 0.3], [-np.inf, np.log(1e-12), 0.0], usual),
            "beta": draw.uniform(0.05, 0.95, size=values[:3]),
            "initial_state": draw.normal(size=(1, self.value_heads, self.head_size, self.head_size)),
            "dy": draw.normal(size=values),
        }
        floats["dstate"] = draw.normal(size=floats["initial_state"].shape)
        found: dict[str, Any] = {name: self._rounded(name, x) for name, x in floats.items()}
        found |= {"mask": None, "segments": None}
        if self.documents:
            mask = np.ones((1, self.length), bool)
            mask[:, self.length // 3 : self.length // 2] = False
            starts = draw.uniform(size=(1, self.length)) < 0.03
            found |= {"mask": mask, "segments": np.cumsum(starts, axis=1).astype(np.int32)}
        return found

    def _rounded(self, name: str, x: np.ndarray) -> np.ndarray:
        exact = x.astype(np.float32)
        return np.array(mx.array(exact).astype(self.kind_of(name)).astype(mx.float32))

    def kind_of(self, name: str) -> mx.Dtype:
        """The dtype of an argument: a model hands over fp32 gates and states."""
        return getattr(mx, self.dtype) if name in ("q", "k", "v", "dy") else mx.float32

    def differentiated(self, function: Implementation, arrays: dict[str, Any]) -> list[mx.array]:
        """y, the final state and the gradients that `function` gives for `arrays`, evaluated."""
        constants = {name: None if arrays[name] is None else mx.array(arrays[name]) for name in ("mask", "segments")}
        given = {name: mx.array(arrays[name]).astype(self.kind_of(name)) for name in (*INPUTS, "dy", "dstate")}
        primals, cotangents = [given[name] for name in INPUTS], [given["dy"], given["dstate"]]

        def call(*given: mx.array) -> tuple[mx.array, mx.array]:
            return function(*given[:-1], initial_state=given[-1], **constants)

        outputs, gradients = mx.vjp(call, primals, cotangents)
        results = [*outputs, *gradients]
        mx.eval(results)
        return results

    def corner(self, name: str, x: Any) -> Any:
        """Of x, the first and the last key head, with their value heads: heads do not know of one another."""
        if x is None or name in ("mask", "segments"):
            return x
        heads = np.array(sorted({0, self.key_heads - 1}))
        if name not in _OF_KEYS:
            repeats = self.value_heads // self.key_heads
            heads = (heads[:, None] * repeats + np.arange(repeats)).reshape(-1)
        return np.take(x, heads, axis=1 if name in (*_STATES, "dstate") else 2)


Truth = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, float]]


def truth_of(workload: Workload) -> Truth:
    """The arguments; the truth for their corner; and the error there of `chunk` on a CPU (in bf16, of `naive`)."""
    arrays = workload.arrays()
    few = {name: workload.corner(name, x) for name, x in arrays.items()}
    exact = recurrence(few, few["dy"], few["dstate"])
    with mx.stream(mx.cpu):
        peer = gated_delta_chunk if workload.dtype == "float32" else gated_delta_naive
        results = workload.differentiated(peer, few)
    peers = {name: relative_norm(wide(x), exact[name]) for name, x in zip(NAMES, results, strict=True)}
    return arrays, exact, peers


def bounds(workload: Workload, peers: dict[str, float], fused: bool) -> dict[str, float]:
    """What each error may be (ops/gated_delta/tolerances.py); `fused`: what the fused kernels promise in fp32."""
    if workload.dtype != "float32":
        return {name: fused_bf16_norm(peers[name]) for name in NAMES}
    return {name: max(FUSED_NORM, peers[name]) if fused else EASY for name in NAMES}


def errors(function: Implementation, workload: Workload, truth: Truth) -> dict[str, float]:
    """`function` on the whole workload, NaN in the memory that it writes to, against the truth for the corner."""
    arrays, exact, _ = truth
    # Once for the sizes of the outputs, and for whatever is made only once.
    poison(workload.differentiated(function, arrays))
    results = workload.differentiated(function, arrays)
    found = {}
    for name, x in zip(NAMES, results, strict=True):
        whole = wide(x)
        found[name] = relative_norm(workload.corner(name, whole), exact[name]) if np.isfinite(whole).all() else np.inf
    return found


def checks(quick: bool) -> Iterator[Check]:
    """One for each implementation and workload; the truth of a workload is computed once."""
    for workload in workloads(quick):
        kept: list[Truth] = []
        for name in ("chunk", "fused", "native"):
            yield Check(f"gated delta, {name}: {workload.name}", partial(_check, name, workload, kept))


def workloads(quick: bool) -> list[Workload]:
    """Heads of released models; `quick`: few and small ones."""
    length, size = (70, 32) if quick else (300, 128)
    few = 2 if quick else 16
    return [
        Workload("scalar gates, bf16", length, few, 2 * few, size, "bfloat16"),
        Workload("scalar gates, fp32, masked documents", length, few, few, size, documents=True),
        Workload("gates per channel, bf16", length, 2 * few, 2 * few, size, "bfloat16", per_channel=True),
        Workload("gates per channel, fp32, masked documents", length, few, few, size, "float32", True, True),
    ]


def _check(name: str, workload: Workload, kept: list[Truth]) -> Outcome:
    function: Callable[..., Any] = gated_delta_chunk
    if name != "chunk":
        if backend.device() == "cpu":
            return not_run("it is for GPUs, and MLX computes on the CPU here")
        arrays = workload.arrays()
        q, k, v, log_g = (mx.array(arrays[key]).astype(workload.kind_of(key)) for key in ("q", "k", "v", "log_g"))
        candidate = choice.CANDIDATES[name](choice.Call(q, k, v, log_g, workload.documents, workload.documents))
        if isinstance(candidate, str):
            return not_run(f"it does not cover this: {candidate}")
        assert candidate.shape is not None
        assert candidate.checked is not None
        trial = machine_trial.again(name, candidate.checked, candidate.shape)
        if not trial.passed:
            # MLX's own operator is not ours to mend, and one that fails its trial is not used.
            return not_run(str(trial)) if name == "native" else Outcome(FAILED, str(trial))
        function = candidate.function
    if not kept:
        kept.append(truth_of(workload))
    outcome = judged(errors(function, workload, kept[0]), bounds(workload, kept[0][2], name == "fused"))
    if outcome.status == FAILED and name == "native" and name not in backend.gated_delta_candidates()[0]:
        return Outcome(
            NOT_RUN,
            f"MLX's own operator is off ({outcome.detail}), and serves nothing here",
            outcome.errors,
            outcome.bounds,
        )
    return outcome
