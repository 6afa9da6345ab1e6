"""The record of a function to replace: its target, reason, replacement, tried versions and evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .versions import TRIED

Function = Callable[..., Any]
# Takes the original and the replacement, and returns the evidence against the replacement, or None.
Check = Callable[[Function, Function], str | None]

# The outcome of a check where the original has no fault any more that the replacement would mend.
SETTLED = "it needs no replacement any more."

# The uses of a model; a record names those that give other results without it.
TRAINING = "training"
PACKING = "packing"
INFERENCE = "inference"
ALWAYS = (TRAINING, PACKING, INFERENCE)


@dataclass(frozen=True)
class Patch:
    """A record of one function to replace.

    Args:
        module: The module that defines the function.
        name: The function's name in that module: `function`, `Class.method`, or `submodule.function`.
        replacement: Takes the original function and returns the one to put in its place.
        check: Compares the original with the replacement on a small case, forward and gradient. It returns None where
            they agree, SETTLED, or a sentence on the difference.
        reason: Why the function is replaced, for `deltatune doctor`.
        without: A sentence on the consequence where the function cannot be replaced, for warnings.
        signature: The signature expected, without annotations: that of the replacement, unless another is given. ""
            for functions with defaults that have no fixed text; `check` then decides alone, as for compiled ones.
        holders: Modules known to import the function. They are examined even if they belong to another package.
        needed_for: The uses of a model that give other results without the replacement: TRAINING, PACKING, INFERENCE.
            Without any, the replacement saves time or memory alone.
        tried: The versions of the package that the record was tried with; TRIED's, unless others are given. They choose
            between records, and `deltatune` says where another version is installed; the evidence decides.
    """

    module: str
    name: str
    replacement: Callable[[Function], Function]
    check: Check
    reason: str
    without: str
    signature: str | None = None
    holders: tuple[str, ...] = ()
    needed_for: tuple[str, ...] = ()
    tried: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tried", self.tried or TRIED[self.package])

    @property
    def package(self) -> str:
        """The package that defines the function, by the name it is imported under."""
        return self.module.partition(".")[0]

    @property
    def target(self) -> str:
        """The full name of the function that is replaced."""
        return f"{self.module}.{self.name}"

    @property
    def attribute(self) -> str:
        """The last part of the target's name."""
        return self.name.rpartition(".")[2]
