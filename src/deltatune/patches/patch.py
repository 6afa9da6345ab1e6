"""Replaces functions of other packages as records (`Patch`) describe them, and restores the originals exactly.

Modules with `from package import function` hold the function itself, so every loaded holder gets the replacement.
revert() gives the original to every module that holds a replacement. A target that differs from its record's
expectation is left alone, with a warning.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .evidence import Fitting, LoadedModules, defined_function, fitting, holders, rebind
from .patch_record import Function, Patch, installed
from .patch_report import Applied, LeftAlone, PatchReport, PatchWarning


class _Loader(importlib.abc.Loader):
    """Loads a module as the module's own loader does, then calls `then`."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must name its own loader, because inspect and pkgutil read source through that.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls `then` once, when the module `name` has been executed without an error. stop() ends the watch earlier."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._finish)
                return spec
        return None

    def _finish(self) -> None:
        self.stop()
        self._then()

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


# The replacement of each target that is in force.
_in_force: dict[str, Fitting] = {}
# For each module that is waited for: its watch, and the records to apply when it is imported, by target.
_watches: dict[str, tuple[ImportWatch, dict[str, list[Patch]]]] = {}


def apply(patches: Sequence[Patch], announce: Callable[[PatchReport], None] | None = None) -> PatchReport:
    """Replace the function of each record, in every loaded module that holds it; report it, and every one left alone.

    Of several records for one target, the first that fits is applied. Functions of modules that are not imported yet
    are replaced when those are imported, and `announce` is called with a further report. Applying twice gives the
    replacement to modules that were loaded in between.
    """
    report = PatchReport()
    targets = _by_target(patches)
    for target, records in targets.items():
        if records[0].module not in sys.modules:
            gone = _moved_away(records)
            if gone is not None:
                report.left_alone.append(gone)
            _watch(records[0].module, announce)[target] = records
            package = records[0].package
            if package not in sys.modules and any(patch.needed_for for patch in records):
                _watch(package, announce)
    _apply_targets([records for records in targets.values() if records[0].module in sys.modules], report)
    report.waiting = list(_watches)
    return report


def preview(patches: Sequence[Patch]) -> PatchReport:
    """Report the functions of imported modules that apply() would leave alone, and change nothing."""
    report = PatchReport()
    for records in _by_target(patches).values():
        if records[0].module in sys.modules and records[0].target not in _in_force:
            fit = fitting(records)
            if isinstance(fit, str):
                report.left_alone.append(_left_alone(records, fit))
    return report


def _by_target(patches: Sequence[Patch]) -> dict[str, list[Patch]]:
    targets: dict[str, list[Patch]] = {}
    for patch in patches:
        targets.setdefault(patch.target, []).append(patch)
    return targets


def warn(report: PatchReport) -> None:
    """Warn (PatchWarning) about all functions that a report leaves alone, and about unreached layers."""
    for message in [*map(str, report.left_alone), *report.unreached]:
        warnings.warn(message, PatchWarning, stacklevel=4)


def _watch(module: str, announce: Callable[[PatchReport], None] | None) -> dict[str, list[Patch]]:
    """Return the records that wait for `module` to be imported, by target; the caller adds to them."""
    if module in _watches:
        return _watches[module][1]
    targets: dict[str, list[Patch]] = {}

    def apply_targets() -> None:
        _watches.pop(module)
        report = PatchReport()
        _apply_targets(list(targets.values()), report)
        awaited = [records for _, others in _watches.values() for records in others.values()]
        gone = [_moved_away(records) for records in awaited if records[0].package == module]
        report.left_alone += [left for left in gone if left is not None]
        if announce is not None:
            announce(report)
        warn(report)

    _watches[module] = ImportWatch(module, apply_targets), targets
    return targets


def revert() -> None:
    """Give the original function back to every module and class that holds a replacement, and stop waiting."""
    for watch, _ in _watches.values():
        watch.stop()
    _watches.clear()
    loaded = LoadedModules(entry.ours for entry in _in_force.values())
    for entry in _in_force.values():
        rebind(entry.patch.attribute, entry.owner, entry.ours, entry.upstream, loaded)
    _in_force.clear()


def in_force(target: str) -> Function | None:
    """The function that replaces `target`, or None where nothing does."""
    entry = _in_force.get(target)
    return entry.ours if entry else None


def _apply_targets(targets: list[list[Patch]], report: PatchReport) -> None:
    """Replace every target, and look through the loaded modules once for all of them."""
    originals = [defined_function(records[0]) for records in targets if records[0].target not in _in_force]
    # A module may have got either of them since the last time.
    replaced = [function for entry in _in_force.values() for function in (entry.ours, entry.upstream)]
    loaded = LoadedModules(function for function in originals + replaced if function is not None)
    for records in targets:
        _apply_target(records, report, loaded)


def _apply_target(records: list[Patch], report: PatchReport, loaded: LoadedModules) -> None:
    """Replace the one target of `records`, and note in `report` the modules that hold it and those left alone."""
    target = records[0].target
    if target not in _in_force:
        fit = fitting(records)
        if isinstance(fit, str):
            report.left_alone.append(_left_alone(records, fit))
        if not isinstance(fit, Fitting):
            return
        _in_force[target] = fit
    entry = _in_force[target]
    rebind(entry.patch.attribute, entry.owner, entry.upstream, entry.ours, loaded)
    held = holders(entry.ours, entry.patch, entry.owner, loaded)
    report.applied.append(Applied(entry.patch, entry.version, tuple(held)))
    for path, value in _other_functions(entry, loaded):
        origin = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
        why = f"{path} is {origin}, neither {entry.patch.package}'s nor deltatune's, so it stays."
        undo = "To let deltatune replace it, undo that change before deltatune's patches are applied."
        message = f"{why} {entry.patch.without} {undo}"
        report.left_alone.append(LeftAlone(entry.patch, entry.version, why, message))


def _left_alone(records: list[Patch], why: str) -> LeftAlone:
    patch = records[0]
    message = f"{patch.target} stays as it is: {why} {patch.without}"
    return LeftAlone(patch, installed(patch.package) or "", why, message)


def _moved_away(records: list[Patch]) -> LeftAlone | None:
    """Return the report on a target if its package is imported and no longer has its module; None otherwise.

    The package's files are looked at, since asking Python for a module would import the packages around it.
    """
    patch = next((patch for patch in records if patch.needed_for), None)
    package, *parts = records[0].module.split(".")
    version = installed(package)
    if patch is None or version is None:
        return None
    folders = [Path(folder, *parts) for folder in getattr(sys.modules[package], "__path__", [])]
    if any(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders):
        return None
    return _left_alone([patch], f"{package} {version} has no module {patch.module} any more.")


def _other_functions(entry: Fitting, loaded: LoadedModules) -> Iterator[tuple[str, Any]]:
    """Yield everything else that the package holds under the target's name: its full name, and the object."""
    patch = entry.patch
    if "." in patch.name:
        value = vars(entry.owner).get(patch.attribute)
        if value is not entry.ours:
            yield patch.target, value
        return
    for module in loaded.of(patch.package):
        value = module.__dict__.get(patch.name)
        if value is not None and value is not entry.ours and not _of_another_target(value, patch):
            yield f"{module.__name__}.{patch.name}", value


def _of_another_target(value: Any, patch: Patch) -> bool:
    """Whether `value` is a function of the same name that another module of the package defines, or replaces it."""
    for entry in _in_force.values():
        if value is entry.ours and entry.patch.target != patch.target:
            return True
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    inside = home is not None and home.__name__.partition(".")[0] == patch.package and home.__name__ != patch.module
    return inside and getattr(value, "__globals__", None) is vars(home)
