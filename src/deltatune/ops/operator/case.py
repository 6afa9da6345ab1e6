"""A case of an operator, with its reference results, and the one loop that tries an implementation on it.

First uses on a machine, `doctor`, `selftest` and tests try implementations by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import mlx.core as mx
import numpy as np

from ...machine import backend
from ..kernels.cubin import built_side_by_side
from ..kernels.launch import Device, on
from .measure import apart, as_float64, poison, relative_error
from .verdicts import Verdict

logger = logging.getLogger(__name__)

# The subject of a case: an operator's function, or the function that runs a kernel's launch.
Tried = TypeVar("Tried")
Array = mx.array | np.ndarray
# The errors of a call that cannot be computed here: in another version of MLX a function may have another name or other
# arguments, or be gone.
_FAILURES = (RuntimeError, ValueError, AttributeError, TypeError)


def by_kernels(function: Callable[[], list[mx.array]]) -> Callable[[Device], list[mx.array]]:
    """Return the call of a kernel's case: it computes `function`, with all launches on the device that is tried."""

    def call(device: Device) -> list[mx.array]:
        with on(device):
            return function()

    return call


def whole(name: str, result: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return a result as the one part that is compared."""
    return {name: [result]}


@dataclass(frozen=True)
class Case(Generic[Tried]):
    """A call, its reference results and its tolerances.

    Attributes:
        name: The subject, in words.
        results: The names of the results.
        call: Calls the subject, and returns the results, not computed yet. For an operator they are its outputs and its
            gradients.
        truth: Computes the reference results.
        bound: The largest error that is allowed.
        bounds: By the name of a part, the largest error where it is not `bound`.
        error: The measure of an error.
        reference: The name of the reference.
        like: Arrays of the sizes of the results.
        parts: Divides a result, given with its name, into arrays that are compared each by itself: of those under one
            name the largest error counts.
    """

    name: str
    results: Sequence[str]
    call: Callable[[Tried], list[mx.array]]
    truth: Callable[[], Sequence[Array]]
    bound: float
    bounds: Mapping[str, float] = field(default_factory=dict)
    error: Callable[[Array, Array], float] = relative_error
    reference: str = "float64"
    like: Sequence[mx.array] = ()
    parts: Callable[[str, np.ndarray], dict[str, list[np.ndarray]]] = whole

    def bound_of(self, part: str) -> float:
        """Return the largest error that is allowed for a part."""
        return self.bounds.get(part, self.bound)

    def computed(self, tried: Tried) -> list[mx.array]:
        """Return the results, computed."""
        results = self.call(tried)
        mx.eval(results)
        return results

    def build(self, tried: Tried) -> None:
        """Build the kernels of the call side by side, where an NVIDIA GPU has them to build."""
        if backend.builds_kernels():
            with built_side_by_side():
                self.call(tried)

    def errors(self, results: Sequence[mx.array], truths: Sequence[Array]) -> dict[str, float]:
        """Return the error of each part of the results."""
        errors: dict[str, float] = {}
        for name, result, truth in zip(self.results, results, truths, strict=True):
            parts, exact = self.parts(name, as_float64(result)), self.parts(name, as_float64(truth))
            for part in parts:
                errors[part] = self._largest(parts[part], exact[part])
        return errors

    def _largest(self, results: list[np.ndarray], truths: list[np.ndarray]) -> float:
        if len(results) != len(truths):
            return float("inf")
        return max((self.error(one, other) for one, other in zip(results, truths, strict=True)), default=0.0)


@apart()
def judged(case: Case[Tried], tried: Tried, name: str) -> Verdict:
    """Try an implementation on a case, and return the verdict. Memory that it leaves unwritten holds NaN.

    The case's arrays are its own and are evaluated at once, so this may run while something else is traced.
    """
    started = time.perf_counter()
    verdict = Verdict(name, case.name, case.bound, reference=case.reference, bounds=dict(case.bounds))
    try:
        truths = case.truth()
        reference_seconds = time.perf_counter() - started
        case.build(tried)
        poison(case.like, thoroughly=False)
        verdict = replace(verdict, errors=case.errors(case.computed(tried), truths))
    except _FAILURES as error:
        return replace(verdict, problem=f"{type(error).__name__}: {error}")
    took = time.perf_counter() - started
    logger.info("%s: %s was tried in %.1f s, of which the truth took %.1f", name, case.name, took, reference_seconds)
    return verdict


@apart()
def measured(case: Case[Tried], tried: Tried) -> dict[str, float]:
    """Return the errors of a second call, before which memory of all sizes is filled with NaN.

    The first call gives the sizes of the results, and makes whatever is made only once. An error is raised here.
    """
    poison([*case.computed(tried), *case.like])
    return case.errors(case.computed(tried), case.truth())
