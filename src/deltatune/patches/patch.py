"""Replaces functions of other packages as records (`Patch`) describe them, and restores the originals exactly.

Modules that write `from package import function` hold the function itself, so every loaded module that holds it gets
the replacement. revert() gives the original to every module that holds a replacement. A target that is not what its
record expects is left alone, with a warning.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..machine import backend
from ..machine.compiling import without_kernels
from .holders import LoadedModules, defined_function, holders, owner_of, rebind
from .importing import ImportWatch
from .patch_record import Function, Patch


class PatchWarning(UserWarning):
    """A target keeps its original code. The message says which one, why, and what that means for training."""


@dataclass(frozen=True)
class Applied:
    """A patch that was applied: the installed version of its package, and the modules that hold the replacement."""

    patch: Patch
    version: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        modules = f" in {len(self.holders)} modules" if len(self.holders) > 1 else ""
        return f"{self.patch.name}{modules} ({self.patch.package} {self.version})"


@dataclass
class PatchReport:
    """What apply() did.

    Attributes:
        applied: The patches that are in force.
        left_alone: A message for each function that keeps its original code.
        waiting: The modules that are not imported yet; their functions are replaced when they are.
        unreached: A message for each gated-delta layer that does not call deltatune.
    """

    applied: list[Applied] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every function was replaced and every layer that was traced calls deltatune."""
        return not self.left_alone and not self.unreached

    def __str__(self) -> str:
        parts = [str(applied) for applied in self.applied] or ["nothing patched yet"]
        return "; ".join(parts + self.left_alone + self.unreached)


@dataclass
class _InForce:
    """A patch in force, with the two functions that it exchanges."""

    patch: Patch
    version: str
    upstream: Function
    ours: Function


# By target.
_in_force: dict[str, _InForce] = {}
# For each module that is waited for: its watch, and the records to apply when it is imported, by target.
_watches: dict[str, tuple[ImportWatch, dict[str, list[Patch]]]] = {}


def apply(patches: Sequence[Patch], announce: Callable[[PatchReport], None] | None = None) -> PatchReport:
    """Replace the function of each record, in every loaded module that holds it.

    Functions of modules that are not imported yet are replaced when those are imported. Applying twice gives the
    replacement to modules that were loaded in between. The call warns (PatchWarning) about every function that it
    leaves alone.

    Args:
        patches: The records. Of several for one target, the first that fits what is installed is applied.
        announce: Is called with a further report whenever a module that was waited for is imported.

    Returns:
        A report of what was done.
    """
    report = PatchReport()
    targets: dict[str, list[Patch]] = {}
    for patch in patches:
        targets.setdefault(patch.target, []).append(patch)
    for target, records in targets.items():
        if records[0].module not in sys.modules:
            _watch(records[0].module, announce)[target] = records
    _apply_targets([records for records in targets.values() if records[0].module in sys.modules], report)
    report.waiting = list(_watches)
    return report


def _watch(module: str, announce: Callable[[PatchReport], None] | None) -> dict[str, list[Patch]]:
    """The records to apply when `module` is imported, by target, for the caller to add to. Starts a watch if needed."""
    if module in _watches:
        return _watches[module][1]
    targets: dict[str, list[Patch]] = {}

    def apply_targets() -> None:
        _watches.pop(module)
        report = PatchReport()
        _apply_targets(list(targets.values()), report)
        if announce is not None:
            announce(report)

    _watches[module] = ImportWatch(module, apply_targets), targets
    return targets


def revert() -> None:
    """Give the original function back to every module and class that holds a replacement, and stop waiting."""
    for watch, _ in _watches.values():
        watch.stop()
    _watches.clear()
    loaded = LoadedModules(entry.ours for entry in _in_force.values())
    for entry in _in_force.values():
        rebind(entry.patch, entry.ours, entry.upstream, loaded)
    _in_force.clear()


def in_force(target: str) -> Function | None:
    """The function that replaces `target`, or None where nothing does."""
    entry = _in_force.get(target)
    return entry.ours if entry else None


def _apply_targets(targets: list[list[Patch]], report: PatchReport) -> None:
    """_apply_target for the records of each target."""
    originals = [defined_function(records[0]) for records in targets if records[0].target not in _in_force]
    replacements = [entry.ours for entry in _in_force.values()]
    loaded = LoadedModules(function for function in originals + replacements if function is not None)
    for records in targets:
        _apply_target(records, report, loaded)


def _apply_target(records: list[Patch], report: PatchReport, loaded: LoadedModules) -> None:
    """Replace the one target of `records`, and note in `report` what was done and what was left alone."""
    target = records[0].target
    if target not in _in_force and _is_settled(records):
        return
    if target not in _in_force:
        fitting = _fitting(records)
        if isinstance(fitting, str):
            _leave_alone(report, f"{target} stays as it is: {fitting} {records[0].without}")
            return
        _in_force[target] = fitting
    entry = _in_force[target]
    rebind(entry.patch, entry.upstream, entry.ours, loaded)
    report.applied.append(Applied(entry.patch, entry.version, tuple(holders(entry.ours, entry.patch, loaded))))
    for path, value in _other_functions(entry, loaded):
        origin = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
        _leave_alone(
            report,
            f"{path} is {origin}, neither {entry.patch.package}'s nor deltatune's, so it stays. "
            f"{entry.patch.without} To let deltatune replace it, undo that change before deltatune's patches are "
            "applied.",
        )


def _leave_alone(report: PatchReport, message: str) -> None:
    report.left_alone.append(message)
    warnings.warn(message, PatchWarning, stacklevel=4)


def _fitting(records: list[Patch]) -> _InForce | str:
    """The record that fits what is installed, with its functions; or a sentence that says why none fits."""
    first = records[0]
    version = _version(first.package)
    fitting = [p for p in records if version and _contains(p.versions, version)]
    if version is None or not fitting:
        return f"{first.package} {version} is not a version that deltatune knows ({_versions(records)})."
    upstream = defined_function(first)
    if upstream is None:
        return f"something else has replaced it, and no loaded module holds {first.package}'s own function."
    signature = _signature(upstream) if first.signature else ""
    patch = next((patch for patch in fitting if patch.signature == signature), fitting[0])
    if signature != patch.signature:
        return f"its signature is {signature}, and {patch.package} {version} was expected to have {patch.signature}."
    ours = functools.wraps(upstream)(patch.replacement(upstream))
    return _check(patch, upstream, ours) or _InForce(patch, version, upstream, ours)


def _check(patch: Patch, upstream: Function, ours: Function) -> str | None:
    """What the record's check says against the replacement, or None."""
    if patch.check is None:
        return None
    # An NVIDIA GPU would have to build kernels for these few numbers, which takes seconds.
    on_cpu = mx.stream(mx.cpu) if backend.device() == "cuda" else nullcontext()
    with without_kernels(), on_cpu:
        return patch.check(upstream, ours)


def _is_settled(records: list[Patch]) -> bool:
    """Whether the installed version needs no replacement."""
    version = _version(records[0].package)
    if version is None or any(_contains(patch.versions, version) for patch in records):
        return False
    return any(patch.settled is not None and _contains(patch.settled, version) for patch in records)


def _contains(versions: str, version: str) -> bool:
    return SpecifierSet(versions).contains(Version(version), prereleases=True)


def _version(package: str) -> str | None:
    """The version that the imported package itself states (mlx states it in mlx.core). Metadata may be another's."""
    for name in (package, f"{package}.core"):
        if hasattr(sys.modules.get(name), "__version__"):
            return str(sys.modules[name].__version__)
    return None


def _versions(records: list[Patch]) -> str:
    return " or ".join(patch.versions for patch in records)


def _signature(function: Function) -> str:
    """The signature of a function as text, without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _other_functions(entry: _InForce, loaded: LoadedModules) -> Iterator[tuple[str, Any]]:
    """Where the package holds another object under the target's name: the full name there, and the object."""
    patch = entry.patch
    if "." in patch.name:
        value = vars(owner_of(patch)).get(patch.attribute)
        if value is not entry.ours:
            yield patch.target, value
        return
    for module in loaded:
        value = module.__dict__.get(patch.name)
        inside = module.__name__.partition(".")[0] == patch.package or module.__name__ in patch.holders
        if inside and value is not None and value is not entry.ours and not _of_another_target(value, patch):
            yield f"{module.__name__}.{patch.name}", value


def _of_another_target(value: Any, patch: Patch) -> bool:
    """Whether `value` is a function of the same name that another module of the package defines, or replaces it."""
    for entry in _in_force.values():
        if value is entry.ours and entry.patch.target != patch.target:
            return True
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    inside = home is not None and home.__name__.partition(".")[0] == patch.package and home.__name__ != patch.module
    return inside and getattr(value, "__globals__", None) is vars(home)
