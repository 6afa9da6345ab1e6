"""A patch is a record: what it replaces, in which versions, why. Apply, and revert exactly.

Consumers import the function by value, so every module that holds the very object is rebound, known or not, and on
revert every module that holds ours gets upstream's back. A target that is not what a record knows is left alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..machine.compiling import without_kernels
from ..ops.trial import largest_error
from .importing import ImportWatch

Function = Callable[..., Any]
OWN = __name__.partition(".")[0]


class PatchWarning(UserWarning):
    """Something stays on upstream's code; the message says what, why, and what that means for the training."""


@dataclass(frozen=True)
class Patch:
    """One replacement. `module` and `name` say where it is defined (`name` may be `Class.method`).

    An empty `signature` is for compiled functions, which show none: their `check` stands for it.
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
    # Versions that need no replacement: what the record mends is right there.
    settled: str | None = None

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Applied:
    """A record in force: `holders` are the modules that hold the replacement now."""

    patch: Patch
    version: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        held = f" in {len(self.holders)} modules" if len(self.holders) > 1 else ""
        return f"{self.patch.name}{held} ({self.patch.package} {self.version})"


@dataclass
class PatchReport:
    """What apply() did. `left_alone` and `unreached` hold messages for a person; `waiting` modules not imported yet."""

    applied: list[Applied] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether nothing that is loaded stays on somebody else's code."""
        return not self.left_alone and not self.unreached

    def __str__(self) -> str:
        parts = [str(each) for each in self.applied] or ["nothing patched yet"]
        return "; ".join(parts + self.left_alone + self.unreached)


@dataclass
class _InForce:
    patch: Patch
    version: str
    upstream: Function
    ours: Function


_in_force: dict[str, _InForce] = {}
# Module -> its watch, and the records that wait for it, by target.
_watches: dict[str, tuple[ImportWatch, dict[str, list[Patch]]]] = {}


def core_record(name: str, replacement: Function, check: Function, *, reason: str, without: str) -> Patch:
    """The record of a function of mlx.core: a compiled one, so `check` stands for its signature."""
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


def differs(found: Sequence[mx.array], expected: Sequence[mx.array], bound: float, what: str) -> str | None:
    """What a check says where the largest difference over the largest element is not below `bound`."""
    worst = largest_error(found, expected)
    return None if worst < bound else f"on a small case it differs from {what} by {worst:.1e} of the largest element."


def apply(patches: Sequence[Patch], announce: Callable[[PatchReport], None] | None = None) -> PatchReport:
    """Put `patches` in force; applying twice only reaches holders that appeared since.

    Targets in modules not imported yet follow when those are imported; `announce` gets the report of each such one.
    Warns (PatchWarning) about everything that is left on other code.
    """
    report = PatchReport()
    targets: dict[str, list[Patch]] = {}
    for patch in patches:
        targets.setdefault(patch.target, []).append(patch)
    for records in targets.values():
        module = records[0].module
        if module in sys.modules:
            _apply_target(records, report)
        else:
            _watch(module, announce)[records[0].target] = records
    report.waiting = list(_watches)
    return report


def _watch(module: str, announce: Callable[[PatchReport], None] | None) -> dict[str, list[Patch]]:
    """What is to be applied when `module` is imported, by target; watches for it if nobody does yet."""
    if module in _watches:
        return _watches[module][1]
    targets: dict[str, list[Patch]] = {}

    def then() -> None:
        _watches.pop(module)
        late = PatchReport()
        for records in targets.values():
            _apply_target(records, late)
        if announce is not None:
            announce(late)

    _watches[module] = ImportWatch(module, then), targets
    return targets


def revert() -> None:
    """Take everything out of force: each module and class that holds a replacement gets upstream's object back."""
    for watch, _ in _watches.values():
        watch.stop()
    _watches.clear()
    for entry in _in_force.values():
        _rebind(entry.patch, entry.ours, entry.upstream)
    _in_force.clear()


def in_force(target: str) -> Function | None:
    """The replacement now in force for `target`, or None."""
    entry = _in_force.get(target)
    return entry.ours if entry else None


def _apply_target(records: list[Patch], report: PatchReport) -> None:
    target = records[0].target
    if target not in _in_force and _is_settled(records):
        return
    if target not in _in_force:
        found = _known(records)
        if isinstance(found, str):
            _leave(report, f"{target} stays as it is: {found} {records[0].without}")
            return
        _in_force[target] = found
    entry = _in_force[target]
    _rebind(entry.patch, entry.upstream, entry.ours)
    report.applied.append(Applied(entry.patch, entry.version, tuple(holders(entry.ours, entry.patch))))
    for where, value in _foreign(entry):
        origin = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
        _leave(
            report,
            f"{where} is {origin}, neither {entry.patch.package}'s nor deltatune's: left alone. "
            f"{entry.patch.without} To hand it over, undo that replacement before deltatune's patches are applied.",
        )


def _leave(report: PatchReport, message: str) -> None:
    report.left_alone.append(message)
    warnings.warn(message, PatchWarning, stacklevel=4)


def _known(records: list[Patch]) -> _InForce | str:
    """The record that fits what is installed, checked against it; or why none does."""
    first = records[0]
    version = _version(first.package)
    fitting = [p for p in records if version and _contains(p.versions, version)]
    if version is None or not fitting:
        return f"{first.package} {version} is not a version that deltatune knows ({_versions(records)})."
    upstream = _upstream(first)
    if upstream is None:
        return f"it was replaced by somebody else, and {first.package}'s own function is nowhere to be found."
    signature = _signature(upstream) if first.signature else ""
    patch = next((patch for patch in fitting if patch.signature == signature), fitting[0])
    if signature != patch.signature:
        return f"its signature is {signature}, and {patch.package} {version} was expected to have {patch.signature}."
    ours = functools.wraps(upstream)(patch.replacement(upstream))
    return _problem(patch, upstream, ours) or _InForce(patch, version, upstream, ours)


def _problem(patch: Patch, upstream: Function, ours: Function) -> str | None:
    if patch.check is None:
        return None
    # Upstream's functions are compiled ones: on CUDA the kernels for a few numbers would take half a minute to build.
    with without_kernels():
        return patch.check(upstream, ours)


def _is_settled(records: list[Patch]) -> bool:
    version = _version(records[0].package)
    if version is None or any(_contains(patch.versions, version) for patch in records):
        return False
    return any(patch.settled is not None and _contains(patch.settled, version) for patch in records)


def _contains(versions: str, version: str) -> bool:
    return SpecifierSet(versions).contains(Version(version), prereleases=True)


def _version(package: str) -> str | None:
    """What the imported package says of itself (mlx says it in mlx.core), not what some metadata on the path says."""
    for name in (package, f"{package}.core"):
        if hasattr(sys.modules.get(name), "__version__"):
            return str(sys.modules[name].__version__)
    return None


def _versions(records: list[Patch]) -> str:
    return " or ".join(patch.versions for patch in records)


def _signature(function: Function) -> str:
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _upstream(patch: Patch) -> Function | None:
    """The function that `patch.module` itself defines, wherever it is still held under its name."""
    for namespace in [_owner(patch)] + [module.__dict__ for module in _modules()]:
        value: Any = namespace.get(_attribute(patch))
        if _defined_by(patch, value):
            return value
    return None


def _defined_by(patch: Patch, value: Any) -> bool:
    if isinstance(value, FunctionType):
        defining = sys.modules[patch.module]
        return value.__code__.co_name == _attribute(patch) and value.__globals__ is defining.__dict__
    # A compiled function has neither code nor globals, only what it says of itself.
    told = (getattr(value, "__module__", None), getattr(value, "__name__", None))
    return not patch.signature and told == (_namespace(patch), _attribute(patch))


def _namespace(patch: Patch) -> str:
    """The module that a compiled function says it is of: `mlx.core.fast` for the name `fast.rope` in `mlx.core`."""
    owner = getattr(sys.modules[patch.module], patch.name.partition(".")[0], None)
    return owner.__name__ if isinstance(owner, ModuleType) else patch.module


def _attribute(patch: Patch) -> str:
    return patch.name.rpartition(".")[2]


def _owner(patch: Patch) -> dict[str, Any]:
    """The namespace in which the target is defined: its module's, or its class's (a copy, for reading)."""
    owner: Any = sys.modules[patch.module]
    for part in patch.name.split(".")[:-1]:
        owner = getattr(owner, part)
    return dict(vars(owner))


def _modules() -> Iterator[ModuleType]:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] != OWN:
            yield module


def holders(function: Function, patch: Patch) -> list[str]:
    """Names of the modules that hold `function` itself; for a method, its class."""
    if "." in patch.name:
        return [patch.target] if _owner(patch).get(_attribute(patch)) is function else []
    return sorted(m.__name__ for m in _modules() if any(value is function for value in list(m.__dict__.values())))


def _rebind(patch: Patch, old: Function, new: Function) -> None:
    if "." in patch.name:
        owner: Any = sys.modules[patch.module]
        for part in patch.name.split(".")[:-1]:
            owner = getattr(owner, part)
        if vars(owner).get(_attribute(patch)) is old:
            setattr(owner, _attribute(patch), new)
        return
    for module in _modules():
        for name, value in list(module.__dict__.items()):
            if value is old:
                module.__dict__[name] = new


def _foreign(entry: _InForce) -> Iterator[tuple[str, Any]]:
    """Places under the package that hold another object by the target's name."""
    patch = entry.patch
    if "." in patch.name:
        value = _owner(patch).get(_attribute(patch))
        if value is not entry.ours:
            yield patch.target, value
        return
    for module in _modules():
        value = module.__dict__.get(patch.name)
        inside = module.__name__.partition(".")[0] == patch.package or module.__name__ in patch.holders
        # A function of that name which another module of the package defines is the package's own, and another one.
        own = _of_another_target(value, patch)
        if inside and value is not None and value is not entry.ours and not own:
            yield f"{module.__name__}.{patch.name}", value


def _of_another_target(value: Any, patch: Patch) -> bool:
    """Whether `value` is what another module of the package defines by that name, or our replacement of it."""
    for entry in _in_force.values():
        if value is entry.ours and entry.patch.target != patch.target:
            return True
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    inside = home is not None and home.__name__.partition(".")[0] == patch.package and home.__name__ != patch.module
    return inside and getattr(value, "__globals__", None) is vars(home)
