"""Reports the functions that were patched, those left alone and why, and versions that nobody has tried."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .patch_record import Patch
from .verify import Serving
from .versions import contains, latest


class PatchWarning(UserWarning):
    """A target keeps its original code. The message names it, the reason, and the consequence for training."""


@dataclass(frozen=True)
class Applied:
    """A patch that was applied: the installed version of its package, and the modules that hold the replacement."""

    patch: Patch
    version: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        modules = f" in {len(self.holders)} modules" if len(self.holders) > 1 else ""
        return f"{self.patch.name}{modules} ({self.patch.package} {self.version})"


@dataclass(frozen=True)
class LeftAlone:
    """A function that keeps its original code.

    Attributes:
        patch: The record that would have replaced it.
        version: The installed version of the package.
        why: The expected and the actual function, in a sentence.
        message: `why`, with the function's name and the consequence for training.
    """

    patch: Patch
    version: str
    why: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass
class PatchReport:
    """The result of apply().

    Attributes:
        applied: The patches that are in force.
        left_alone: The functions that keep their original code.
        waiting: The modules that are not imported yet; their functions are replaced when they are.
        unreached: A message for each gated-delta layer that does not call deltatune.
        serving: The implementations that serve each layer of the model that was traced.
    """

    applied: list[Applied] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    serving: Serving = field(default_factory=Serving)

    @property
    def layers(self) -> dict[str, str]:
        """The implementation of each gated-delta layer of the model that was traced (Serving.delta)."""
        return self.serving.delta

    @property
    def complete(self) -> bool:
        """Whether every function was replaced and every layer that was traced calls deltatune."""
        return not self.left_alone and not self.unreached

    @property
    def untried(self) -> list[str]:
        """A sentence for each installed version that the records do not name."""
        by_version: dict[tuple[str, str], list[tuple[Patch, bool]]] = defaultdict(list)
        for applied in self.applied:
            by_version[applied.patch.package, applied.version].append((applied.patch, True))
        for left in self.left_alone:
            by_version[left.patch.package, left.version].append((left.patch, False))
        lines = []
        for (package, version), patches in by_version.items():
            new = [(patch, behaves) for patch, behaves in patches if not contains(patch.tried, version)]
            if new:
                known = latest([patch.tried for patch, _ in new])
                lines.append(
                    f"{package.replace('_', '-')} {version} has not been tried with this deltatune; "
                    f"{sum(behaves for _, behaves in new)} of {len(new)} functions behave as in {known}."
                )
        return lines

    def summary(self) -> str:
        """Count the functions that were replaced and name their packages; those left alone are named in full."""
        count = len(self.applied)
        packages = ", ".join(sorted({f"{applied.patch.package} {applied.version}" for applied in self.applied}))
        return "; ".join(self._parts([f"{count} function{'s' * (count != 1)} of {packages}"]))

    def __str__(self) -> str:
        return "\n".join(self._parts([str(applied) for applied in self.applied]))

    def _parts(self, applied: list[str]) -> list[str]:
        parts = applied if self.applied else ["nothing patched yet"]
        return [*parts, *self.untried, *map(str, self.left_alone), *self.unreached]
