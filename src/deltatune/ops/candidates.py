"""Chooses the implementation that serves a call, for gated_delta and for attention (choice.py of either).

Each device has an order of preference (machine/backend.py). The first implementation in it that supports the call and
passes its check on this machine is used; the last one supports every call.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .tracing import trace
from .verdicts import Verdict, machine

logger = logging.getLogger(__name__)

# The messages that this process has shown.
_announced: set[str] = set()


class ImplementationWarning(UserWarning):
    """Warns that a fast implementation is wrong on this machine and is not used; the message says by how much."""


@dataclass(frozen=True)
class Candidate:
    """An implementation that supports a call.

    Attributes:
        function: Serves the call.
        shape: The class of calls whose verdict decides about this one; None where no check is needed.
        checked: The function that the check calls, which runs the same kernels on a small batch.
    """

    function: Callable[..., Any]
    shape: Any = None
    checked: Callable[..., Any] | None = None


def without_trials() -> AbstractContextManager[None]:
    """Within the context, the last implementation of each operator serves, which needs neither kernels nor a trial."""
    return trace.having(trials=False)


def choose(
    operator: str,
    variable: str,
    order: tuple[tuple[str, ...], str],
    candidate_of: Callable[[str], Candidate | str],
    verdict_of: Callable[[str, Callable[..., Any], Any], Verdict],
) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of the implementation that serves a call.

    It warns (ImplementationWarning) about an implementation that fails its check, once per class of shapes.

    Args:
        operator: The operator's name, for messages.
        variable: The environment variable that forces an implementation.
        order: The names of the implementations in order of preference, and the reason for that order. A single name is
            forced.
        candidate_of: Returns the candidate of a name, or why that implementation does not support the call.
        verdict_of: Returns the verdict on an implementation, from its name and its candidate's `checked` and `shape`.

    Raises:
        UserError: The variable forces an implementation that does not support the call or fails its check.
    """
    names, why = order
    names = names if trace.current().trials else names[-1:]
    forced = len(names) == 1
    passed_over = []
    for name in names:
        candidate = candidate_of(name)
        if isinstance(candidate, str):
            if forced:
                raise UserError(f"{variable}={name} cannot serve this call: {candidate}.")
            passed_over.append(f"{name} does not support this call: {candidate}")
            continue
        checked = candidate.checked
        verdict = None if checked is None else verdict_of(name, checked, candidate.shape)
        if verdict is None or verdict.passed:
            message = f"{operator}: {name} ({'; '.join([why, *passed_over])})"
            if _is_new(message):
                logger.info(message)
            return name, candidate.function
        if forced:
            raise UserError(f"{variable}={name}: {verdict}. Unset it for the automatic choice.")
        _warn(operator, verdict)
        passed_over.append(f"{name} fails its check")
    raise AssertionError(f"{names[-1]} supports every call")


def _is_new(message: str) -> bool:
    new = message not in _announced
    _announced.add(message)
    return new


def _warn(operator: str, failure: Verdict) -> None:
    message = (
        f"{operator}: {failure}. It is not used on this machine ({machine()['device']}): training goes on without it, "
        "correctly but more slowly. `deltatune doctor` shows every error that was measured."
    )
    if _is_new(message):
        warnings.warn(message, ImplementationWarning, stacklevel=5)
