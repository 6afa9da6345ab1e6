"""One thing that the self-test tries, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import first_line

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

# What MLX and upstream's classes raise where something does not run here; the other checks still have their turn.
FAILURES = (RuntimeError, ValueError, OSError, TypeError, AttributeError, LookupError, ImportError, ArithmeticError)


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Args:
        status: `passed`, `failed` or `not run`.
        detail: a sentence for a person.
        errors: what was measured, by name; relative norms where the check does not say otherwise.
        bounds: what each of them may be at most.
        facts: other figures for the record.
    """

    status: str
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> str | None:
        """The name of the error that comes nearest to its bound, or goes furthest beyond it."""
        return max(self.errors, key=lambda name: self.errors[name] / self.bounds[name], default=None)


@dataclass(frozen=True)
class Check:
    """A check by name, and what runs it."""

    name: str
    run: Callable[[], Outcome]


def attempt(check: Check) -> Outcome:
    """The outcome of `check`; failed, with the error's words, where it raises."""
    try:
        return check.run()
    except FAILURES as error:
        return Outcome(FAILED, f"{type(error).__name__}: {first_line(error)[:400]}")


def not_run(reason: str) -> Outcome:
    """The outcome of a check that has nothing to try here."""
    return Outcome(NOT_RUN, reason)


def judged(errors: dict[str, float], bounds: dict[str, float], **facts: Any) -> Outcome:
    """Passed where each error is at most its bound; the detail names the one nearest to it."""
    # Written so that NaN fails.
    passed = all(errors[name] <= bounds[name] for name in errors)
    outcome = Outcome(PASSED if passed else FAILED, "", errors, bounds, facts)
    name = outcome.worst
    assert name is not None, "something was measured"
    return Outcome(outcome.status, f"{name} {errors[name]:.1e} of {bounds[name]:.1e}", errors, bounds, facts)
