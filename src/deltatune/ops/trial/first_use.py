"""The trial of a kernel before its first use in a process: a warning says which one is wrong here and is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from .case import Case, Tried, judged

logger = logging.getLogger(__name__)

# By the function that makes the case, what it is made for, and what runs the kernel: whether it was right.
_right: dict[Hashable, bool] = {}


def is_right(
    case_of: Callable[..., Case[Any]],
    *kind: Hashable,
    run: Callable[..., list[mx.array]],
    instead: str = "MLX's operations",
    arrays: Sequence[mx.array] = (),
) -> bool:
    """Whether a kernel is right on this machine, which is tried once in a process for each kind of call.

    Args:
        case_of: Makes the case from `kind` and `arrays`.
        kind: What the kernel's text depends on.
        run: Runs the kernel's launch.
        instead: What serves in place of a kernel that is wrong, for the warning.
        arrays: Further arguments of `case_of`, of which only the number makes a difference.
    """
    key: tuple[Any, ...] = (case_of, kind, len(arrays), run)
    if key not in _right:
        _right[key] = agrees(case_of(*kind, *arrays), run, instead)
    return _right[key]


def agrees(case: Case[Tried], run: Tried, instead: str = "MLX's operations") -> bool:
    """Whether a kernel is right on this case, tried now; if not, a warning says why. See is_right."""
    verdict = judged(case, run, "kernel")
    if verdict.passed:
        return True
    if verdict.problem is not None:
        reason = verdict.problem.splitlines()[0][:300]
        logger.warning("%s does not run on this machine, so %s serve instead: %s", case.name, instead, reason)
        return False
    worst = verdict.worst
    message = "%s is off by %.1e of the largest element on this machine (%.1e allowed), so %s serve instead."
    logger.warning(message, case.name, verdict.errors[worst], verdict.bound_of(worst), instead)
    return False


def forget() -> None:
    """Forget what was right in this process."""
    _right.clear()
