"""The trial of a kernel before its first use in a process: a warning says which one is wrong here and is not used.

A kernel that Metal's compiler refuses is not given to it by later processes either, until a version changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import foresight, verdicts
from .case import Case, Tried, judged
from .verdicts import Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kind:
    """The parameters of a kernel's text, as text."""

    kind: str


# By the function that makes the case, its arguments, and the function that runs the kernel: whether it was right.
_right: dict[Hashable, bool] = {}


def is_right(
    case_of: Callable[..., Case[Any]],
    *kind: Hashable,
    run: Callable[..., list[mx.array]],
    instead: str = "MLX's operations",
    arrays: Sequence[mx.array] = (),
) -> bool:
    """Whether a kernel is right on this machine, which is tried once in a process for each kind of call.

    `kind` has the parameters of the kernel's text; the case is made from these and `arrays`, of which only the number
    makes a difference. `run` runs the kernel's launch; `instead` is the fallback of a wrong kernel, for the warning.
    """
    key: tuple[Any, ...] = (case_of, kind, len(arrays), run)
    if key not in _right and foresight.looks_ahead():
        foresight.build(key, lambda: case_of(*kind, *arrays).call(run))
        return True
    if key not in _right:
        name, shape = case_of.__module__.rpartition(".")[2], _Kind(repr((case_of.__qualname__, kind, len(arrays))))
        verdict = verdicts.remembered(name, shape)
        if verdict is None:
            verdict = verdicts.of_refused(judged(case_of(*kind, *arrays), run, "kernel"), name, shape)
        _right[key] = _said(verdict, instead)
    return _right[key]


def agrees(case: Case[Tried], run: Tried, instead: str = "MLX's operations") -> bool:
    """Whether a kernel is right on this case, tried now; if not, a warning says why. See is_right."""
    return _said(judged(case, run, "kernel"), instead)


def _said(verdict: Verdict, instead: str) -> bool:
    """Whether a verdict says that a kernel is right; if not, a warning says why."""
    if verdict.passed:
        return True
    if verdict.problem is not None:
        reason = verdict.problem.splitlines()[0][:400]
        logger.warning("%s does not run on this machine, so %s serve instead: %s", verdict.shape, instead, reason)
        return False
    worst = verdict.worst
    message = "%s is off by %.1e of the largest element on this machine (%.1e allowed), so %s serve instead."
    logger.warning(message, verdict.shape, verdict.errors[worst], verdict.bound_of(worst), instead)
    return False


def forget() -> None:
    """Forget the verdicts of this process."""
    _right.clear()
