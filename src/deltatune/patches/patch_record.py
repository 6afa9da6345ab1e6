"""The record of a function to replace: which one, in which versions, why, with what, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..ops.trial import largest_error

Function = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """A record of one function to replace.

    Args:
        package: The package that defines the function, by the name it is imported under.
        versions: The versions of the package that the record is for, such as ">=0.32.0,<=0.32.2".
        module: The module that defines the function.
        name: The function's name in that module: `function`, `Class.method`, or `submodule.function`.
        signature: The signature expected, without annotations. "" for functions that show none, such as compiled ones,
            or whose defaults have no fixed text; `check` then decides alone.
        holders: Modules known to import the function. They are examined even if they belong to another package.
        reason: Why the function is replaced, for `deltatune doctor`.
        without: A sentence on what happens where the function cannot be replaced, for warnings.
        replacement: Takes the original function and returns the one to put in its place.
        check: Compares the original with the replacement on a small case. It returns None where they agree, and
            otherwise a sentence that says what differs.
        settled: The versions in which the function needs no replacement; they cause no warning.
    """

    package: str
    versions: str
    module: str
    name: str
    signature: str
    holders: tuple[str, ...]
    reason: str
    without: str
    replacement: Callable[[Function], Function]
    check: Callable[[Function, Function], str | None] | None = None
    settled: str | None = None

    @property
    def target(self) -> str:
        """The full name of the function that is replaced."""
        return f"{self.module}.{self.name}"

    @property
    def attribute(self) -> str:
        """The last part of the target's name."""
        return self.name.rpartition(".")[2]


def core_record(name: str, replacement: Function, check: Function, *, reason: str, without: str) -> Patch:
    """The record of a function of mlx.core. Those are compiled and show no signature, so `check` is required."""
    return Patch(
        package="mlx",
        versions=">=0.31.2,<0.33",
        module="mlx.core",
        name=name,
        signature="",
        holders=(),
        reason=reason,
        without=without,
        replacement=replacement,
        check=check,
    )


def describe_difference(
    actual: Sequence[mx.array], expected: Sequence[mx.array], bound: float, reference: str
) -> str | None:
    """The sentence that a check returns where `actual` differs from `expected`, which `reference` names; else None.

    The largest difference relative to the largest element must be below `bound`.
    """
    error = largest_error(actual, expected)
    if error < bound:
        return None
    return f"on a small case it differs from {reference} by {error:.1e} of the largest element."
