"""Chooses the implementation of an operator that serves a call.

Each device has an order of preference. Of the implementations that support the call and pass their
check on this machine, the first one in it is used; on a device without a measured order, the fastest one with the same
bits in every run. The last one supports every call.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ...errors import UserError
from ...machine import backend
from ..tracing import dispatch
from . import foresight, rankings, timing, verdicts
from .case import judged
from .operator import Candidate, Operator
from .verdicts import Verdict, machine

logger = logging.getLogger(__name__)

# The messages that this process has shown.
_announced: set[str] = set()


class ImplementationWarning(UserWarning):
    """Warns that a fast implementation is wrong on this machine and is not used; the message says by how much."""


def without_trials() -> AbstractContextManager[None]:
    """Within the context, the last implementation of each operator serves, which needs neither kernels nor a trial."""
    return dispatch.having(trials=False)


def choose(operator: Operator, call: Any) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of the implementation that serves a call, of the class that candidates take.

    It warns (ImplementationWarning) if the preferred implementation fails its check, once per class of calls. Inside a
    run, the choice for a class is made once, and kept in its state (rankings.py). UserError if the variable forces an
    implementation that does not support the call or fails its check.
    """
    names, why = operator.order()
    names = names if dispatch.current().trials else names[-1:]
    forced, run, key = len(names) == 1, rankings.current(), f"{operator.name}, {call.words}"
    known = None if run is None or forced else run.names.get(key)
    if known is not None:
        # Of a run on another device, only implementations of this one can serve. The one that supports every call leads
        # where it was the fastest, and otherwise serves calls that no other supports.
        last, others = names[-1], [name for name in known if name in names[:-1]]
        names = (last, *others) if known[:1] == [last] else (*others, last)
    if foresight.looks_ahead():
        return _foreseen(operator, names, call)
    measured = backend.compares_times()
    compares = measured and known is None and not forced and (run is None or run.by_time)
    serving = _right(operator, names, call, first=not compares, forced=forced)
    ranked, notes = list(serving.right), serving.notes
    tried = any(candidate.checked and not candidate.trusted for candidate in serving.right.values())
    if (compares and len(ranked) > 1) or (forced and measured and tried):
        ranked, words = _by_time(operator, serving.right)
        notes = notes + words
    reason = "; ".join([why, *notes])
    if run is not None and known is None and (compares or tried or serving.refused):
        run.reasons[key] = reason
        if not forced:
            run.names[key] = ranked if compares else [name for name in names if name not in serving.refused]
    message = f"{operator.name}: {ranked[0]} ({reason})"
    if _is_new(message):
        logger.info(message)
    return ranked[0], serving.right[ranked[0]].function


def _foreseen(operator: Operator, names: Sequence[str], call: Any) -> tuple[str, Callable[..., Any]]:
    """Return the probable implementation of a foreseen call; the kernels of the trials before it are built."""
    serving: list[tuple[str, Callable[..., Any]]] = []
    for name in names:
        candidate = operator.candidates[name](call)
        if isinstance(candidate, str) or not _may_pass(operator, name, candidate):
            continue
        serving.append((name, candidate.function))
        if not backend.compares_times():
            break
    return serving[0]


def _may_pass(operator: Operator, name: str, candidate: Candidate) -> bool:
    """Whether nothing is known against a candidate; where nothing is known, its trial's kernels are built."""
    if candidate.checked is None or candidate.trusted:
        return True
    stored, shape, checked = _stored(operator, name), candidate.shape, candidate.checked
    verdict = verdicts.remembered(stored, shape)
    if verdict is None:
        foresight.build((stored, shape), lambda: operator.case_of(shape).call(checked))
    return verdict is None or verdict.passed


@dataclass(frozen=True)
class _Serving:
    """The implementations that support a call and pass their checks, and the names and reasons of the others."""

    right: dict[str, Candidate]
    refused: list[str]
    notes: list[str]


def _right(operator: Operator, names: Sequence[str], call: Any, *, first: bool, forced: bool) -> _Serving:
    """Return those of `names` that serve a call: only the `first`, or all. A single name may be forced."""
    serving = _Serving({}, [], [])
    for name in names:
        candidate = operator.candidates[name](call)
        if isinstance(candidate, str):
            if forced:
                raise UserError(f"{operator.variable}={name} cannot serve this call: {candidate}.")
            serving.notes.append(f"{name} does not support this call: {candidate}")
            continue
        untried = candidate.checked is None or candidate.trusted
        verdict = None if untried else verdict_on(operator, name, candidate)
        if verdict is None or verdict.passed:
            serving.right[name] = candidate
            if first:
                break
        elif forced:
            raise UserError(f"{operator.variable}={name}: {verdict}. Unset it for the automatic choice.")
        else:
            _tell(operator.name, verdict, preferred=name == names[0])
            serving.refused.append(name)
            serving.notes.append(f"{name} fails its check")
    if not serving.right:
        raise AssertionError(f"{names[-1]} supports every call")
    return serving


def times(operator: Operator, right: dict[str, Candidate]) -> dict[str, Verdict]:
    """Return the verdicts on right implementations with their times: stored ones, or those of runs now (wants_time).

    One that cannot be timed has none.
    """
    checked = {name: candidate for name, candidate in right.items() if candidate.checked}
    on_each = {name: verdict_on(operator, name, candidate) for name, candidate in checked.items()}
    if any(verdicts.wants_time(_stored(operator, name), right[name].shape, on_each[name]) for name in on_each):
        # All run on the same arrays, those of the first one's class.
        case = operator.timed_case_of(next(iter(checked.values())).shape)
        mx.eval(case.like)
        runs = {name: partial(case.call, _checked(candidate)) for name, candidate in checked.items()}
        for name, measured in timing.side_by_side(runs).items():
            steady = replace(measured, same_bits=measured.same_bits and not right[name].atomics)
            on_each[name] = verdicts.timed(_stored(operator, name), right[name].shape, on_each[name], steady)
    return on_each


def _by_time(operator: Operator, right: dict[str, Candidate]) -> tuple[list[str], list[str]]:
    """Return the names, the fastest first, of those that give the same bits in every run; and the times in words.

    Where none does, all are ranked.
    """
    timed = times(operator, right)
    seconds = {name: verdict.seconds for name, verdict in timed.items() if verdict.seconds is not None}
    steady = {name: time for name, time in seconds.items() if timed[name].same_bits}
    ranked = timing.fastest_first(steady or seconds, list(right))
    of_each = [timing.words(name, verdict.seconds, verdict.same_bits) for name, verdict in timed.items()]
    words = [", ".join(of_each)] if seconds else []
    changing = [name for name in seconds if name not in steady]
    if changing and len(right) > 1:
        asks = " or ".join(f"{operator.variable}={name}" for name in changing)
        words.append(f"{asks} uses it all the same: two runs then give different bits")
    return ranked or list(right), words


def verdict_on(operator: Operator, name: str, candidate: Candidate) -> Verdict:
    """Return the verdict on a candidate: the stored one, or else that of a trial now."""
    return verdicts.of(_stored(operator, name), candidate.shape, lambda: _judged(operator, name, candidate))


def verdict_anew(operator: Operator, name: str, candidate: Candidate) -> Verdict:
    """Try a candidate now, whatever verdict is stored, and store the new one."""
    return verdicts.again(_stored(operator, name), candidate.shape, lambda: _judged(operator, name, candidate))


def _judged(operator: Operator, name: str, candidate: Candidate) -> Verdict:
    if candidate.trusted:
        # Nothing but its times is of interest.
        return Verdict(name, str(candidate.shape), 0.0, reference="itself")
    return judged(operator.case_of(candidate.shape), _checked(candidate), name)


def _checked(candidate: Candidate) -> Callable[..., Any]:
    if candidate.checked is None:
        raise AssertionError(f"{candidate.function}: the candidate has no function to try")
    return candidate.checked


def _stored(operator: Operator, name: str) -> str:
    return f"{operator.name}-{name}"


def _is_new(message: str) -> bool:
    new = message not in _announced
    _announced.add(message)
    return new


def _tell(operator: str, failure: Verdict, *, preferred: bool) -> None:
    """Warn about the preferred implementation; training loses nothing that it relied on by the failure of another."""
    message = (
        f"{operator}: {failure}. It is not used on this machine ({machine()['device']}): training goes on without it, "
        "correctly but more slowly. `deltatune doctor` shows every error that was measured."
    )
    if not preferred:
        logger.info("%s: %s. It is not used.", operator, failure)
    elif _is_new(message):
        warnings.warn(message, ImplementationWarning, stacklevel=5)
