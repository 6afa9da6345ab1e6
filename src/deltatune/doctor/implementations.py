"""Measures whether each implementation of an operator that may be chosen here computes right results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..machine import backend
from ..ops import operators
from ..ops.gated_delta.tolerances import TF32
from ..ops.kernels.cubin import built_side_by_side
from ..ops.operator import candidates, timing
from ..ops.operator.operator import Candidate, Operator
from ..ops.operator.verdicts import Verdict


@dataclass
class Finding:
    """The result of one implementation on one class of shapes, with the reason for its status in `detail`.

    The status is `right`, `TF32`, `wrong`, `refused` or `not covered`. Errors are relative to the largest element, and
    the `worst` to its `bound`. `seconds` is the time of the trial, in which kernels are built that no process has built
    before.
    """

    implementation: str
    shape: str
    status: str
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    worst: str | None = None
    bound: float | None = None
    seconds: float | None = None

    @property
    def wrong(self) -> bool:
        return self.status == "wrong"


@dataclass
class OperatorFindings:
    """The findings on one operator, and the order of the implementations that may serve here, with the reason."""

    name: str
    order: str
    findings: list[Finding]


def build(builders: ThreadPoolExecutor) -> None:
    """Let `builders` build the kernels that `findings` tries, where an NVIDIA GPU has any to build."""
    if not backend.builds_kernels():
        return
    with built_side_by_side(builders):
        for operator in operators.OPERATORS:
            for call in operator.examples():
                candidate = operator.candidates["fused"](call)
                if not isinstance(candidate, str) and candidate.checked is not None:
                    operator.case_of(candidate.shape).call(candidate.checked)


def findings() -> list[OperatorFindings]:
    """Compare the last implementation of each operator with the definition, and try the faster ones."""
    return [_of_operator(operator) for operator in operators.OPERATORS]


def _of_operator(operator: Operator) -> OperatorFindings:
    names, why = operator.order()
    results = [_of_last(verdict) for verdict in operator.compare_last()]
    for name in operator.fast:
        # On a GPU the fused kernels are tried in any case. On a CPU MLX's own attention has no trial.
        if (operator.tries and name == "fused") or (name in names and (operator.tries or name == "fused")):
            results += _tried(operator, name, names)
    return OperatorFindings(operator.name, f"{', then '.join(names)} ({why})", results)


@dataclass
class Times:
    """The shortest milliseconds of a forward and a backward pass on one class of shapes, by right implementation.

    Those of which bits differ from run to run are `changing`; they serve only where they are forced.
    """

    calls: str
    milliseconds: dict[str, float]
    changing: list[str]

    def __str__(self) -> str:
        times = self.milliseconds.items()
        return ", ".join(timing.words(name, ms / 1e3, name not in self.changing) for name, ms in times)


def times() -> list[Times]:
    """Time the implementations that findings() has found right, on a GPU."""
    tried = [operator for operator in operators.OPERATORS if operator.tries]
    return [_times(operator, call) for operator in tried for call in operator.examples()]


def right_here(operator: Operator, call: Any) -> dict[str, Candidate]:
    """The implementations that support a call and are right on this machine, by name."""
    right = {}
    for name, candidate_of in operator.candidates.items():
        candidate = candidate_of(call)
        if isinstance(candidate, str) or candidate.checked is None:
            continue
        if candidate.trusted or candidates.verdict_on(operator, name, candidate).passed:
            right[name] = candidate
    return right


def _times(operator: Operator, call: Any) -> Times:
    verdicts = candidates.times(operator, right_here(operator, call))
    timed = {name: verdict for name, verdict in verdicts.items() if verdict.seconds}
    milliseconds = {name: 1e3 * (verdict.seconds or 0.0) for name, verdict in timed.items()}
    changing = [name for name, verdict in timed.items() if not verdict.same_bits]
    return Times(f"{operator.name}, {call.words}", milliseconds, changing)


def _of_last(verdict: Verdict) -> Finding:
    """Judge the implementation that serves every call, which nothing replaces where it is wrong."""
    finding = _finding(verdict, "right" if verdict.passed else "wrong")
    if not verdict.passed and not backend.uses_blas() and max(verdict.errors.values(), default=math.inf) <= TF32:
        finding.status = "TF32"
        finding.detail += "; MLX multiplies fp32 in TF32 on this GPU unless MLX_ENABLE_TF32=0 is set"
    return finding


def _tried(operator: Operator, name: str, names: Sequence[str]) -> list[Finding]:
    """Try an implementation. One that fails is not used, unless it is forced, and then training does not start."""
    results = []
    for call in operator.examples():
        candidate = operator.candidates[name](call)
        if isinstance(candidate, str):
            results.append(Finding(name, call.words, "not covered", candidate))
        elif candidate.checked is not None:
            begun = time.perf_counter()
            verdict = candidates.verdict_anew(operator, name, candidate)
            failed = "wrong" if tuple(names) == (name,) else "refused"
            results.append(_finding(verdict, "right" if verdict.passed else failed))
            results[-1].seconds = time.perf_counter() - begun
    return results


def _finding(verdict: Verdict, status: str) -> Finding:
    worst = verdict.worst if verdict.errors else None
    bound = verdict.bound if worst is None else verdict.bound_of(worst)
    return Finding(verdict.implementation, verdict.shape, status, str(verdict), verdict.errors, worst, bound)
