"""Reports the functions that were patched and those left alone, and refuses to go on where results depend on these."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import mlx.nn as nn

from ..errors import UserError
from ..layers import ENTRY_POINT, gated_delta_layers
from .patch_record import Patch
from .verify import Serving
from .versions import contains, latest

_GO_ON = "or go on all the same with --force (in Python: strict=False)"


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
    """A function that keeps its original code: the record that would have replaced it, and the package's version.

    `why` compares the expected and the actual function; `message` adds the name and the consequence for training.
    """

    patch: Patch
    version: str
    why: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass
class PatchReport:
    """The functions that patched() found.

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


def refuse(report: PatchReport, model: nn.Module | None, uses: Collection[str]) -> None:
    """Raise UserError if the report leaves something alone that these uses of the model depend on.

    It names each function, the expected and the actual one, and the remedy. None as model takes every function for one
    that it calls.
    """
    missing = [left for left in report.left_alone if set(left.patch.needed_for) & set(uses)]
    missing = [left for left in missing if model is None or calls(model, left.patch)]
    if not missing and not report.unreached:
        return
    because = [
        f"{left.patch.target} ({left.patch.package} {left.version}): {left.why} {left.patch.without}"
        for left in missing
    ]
    said = " ".join(because or report.unreached)
    raise UserError(
        f"The results of this run depend on deltatune's code, and upstream's would run: {said} {_advice(missing)}"
    )


def calls(model: nn.Module, patch: Patch) -> bool:
    """Whether a model calls the target of a record, as far as its classes and their modules tell."""
    if patch.package == "mlx":
        return True
    if patch.name == ENTRY_POINT:
        return bool(gated_delta_layers(model)) and any(
            cls.__module__.partition(".")[0] == patch.package for cls in _classes(model)
        )
    owner = patch.name.rpartition(".")[0]
    if owner:
        return any(cls.__module__ == patch.module for cls in _classes(model))
    return any(patch.name in vars(sys.modules.get(cls.__module__, sys)) for cls in _classes(model))


def _classes(model: nn.Module) -> set[type]:
    return {base for module in model.modules() for base in type(module).__mro__}


def _advice(missing: list[LeftAlone]) -> str:
    wanted = dict.fromkeys(
        f"'{left.patch.package.replace('_', '-')}=={latest([left.patch.tried])}'" for left in missing
    )
    if not wanted:
        return f"Undo what replaces that code, {_GO_ON}."
    return f"Install a version that works, pip install {' '.join(wanted)}, {_GO_ON}."
