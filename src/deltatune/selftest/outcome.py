"""A check of the self-test, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import first_line
from ..ops.operator.case import Case, Tried, measured
from ..ops.operator.verdicts import part

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

# The exceptions of MLX and upstream's classes where something does not run here; the remaining checks still run.
FAILURES = (RuntimeError, ValueError, OSError, TypeError, AttributeError, LookupError, ImportError, ArithmeticError)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check: `passed`, `failed` or `not run`, a sentence for a person, and other facts for the file.

    Errors are relative norms where the check does not say otherwise, and each has its bound.
    """

    status: str
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> str | None:
        """The name of the error that is largest relative to its bound; None where nothing was measured."""
        return max(self.errors, key=lambda name: part(self.errors[name], self.bounds[name]), default=None)


@dataclass(frozen=True)
class Check:
    """A check: its name and the function that runs it."""

    name: str
    run: Callable[[], Outcome]


def attempt(check: Check) -> Outcome:
    """Run `check`; where it raises, the outcome is failed, with the error's words."""
    try:
        return check.run()
    except FAILURES as error:
        return Outcome(FAILED, f"{type(error).__name__}: {first_line(error)[:400]}")


def not_run(reason: str) -> Outcome:
    """The outcome of a check that does not apply to this machine or installation."""
    return Outcome(NOT_RUN, reason)


def tried(case: Case[Tried], function: Tried) -> Outcome:
    """The outcome of a case: the results of `function` are compared with the truth, and memory holds NaN beforehand."""
    errors = measured(case, function)
    return compared_with_bounds(errors, {part: case.bound_of(part) for part in errors})


def compared_with_bounds(errors: dict[str, float], bounds: dict[str, float], **facts: Any) -> Outcome:
    """The outcome of a comparison, which passes where each error is at most its bound; the detail names the worst."""
    # The comparison is written so that an error of NaN fails.
    passed = all(errors[name] <= bounds[name] for name in errors)
    outcome = Outcome(PASSED if passed else FAILED, "", errors, bounds, facts)
    name = outcome.worst
    assert name is not None, "at least one error was measured"
    return Outcome(outcome.status, f"{name} {errors[name]:.1e} of {bounds[name]:.1e}", errors, bounds, facts)
