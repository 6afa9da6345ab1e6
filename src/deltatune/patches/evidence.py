"""Finds the record that fits the installed function, of any version, and the modules that hold that function.

Its signature and its check decide. A passed check is remembered in the cache folder, by the text of the function's
modules, of MLX, of deltatune and of the machine, so that a second start asks nothing. Modules that write `from package
import function` hold the function itself. deltatune's own modules are never changed.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx

from ..errors import UserError, first_line
from ..machine import atomic_files, backend, environment
from ..machine.compiling import not_compiled
from ..ops import IMPLEMENTATIONS
from ..ops.operator import candidates
from ..ops.random_state import drawing_from
from .patch_record import SETTLED, Function, Patch, installed
from .whole_rows import noting_calls

_OWN_PACKAGE = __name__.partition(".")[0]
# Many of all loaded names are theirs, and they know nothing of MLX.
_UNRELATED = {"numpy", "pandas", "pyarrow", "matplotlib", "transformers", "huggingface_hub"}


class LoadedModules:
    """Every loaded module that may know MLX and is not deltatune's own, and which hold some functions under any name.

    One pass over all names finds every function. A pass for each of thirty functions would take half a second.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        self._functions = {id(function): function for function in functions}
        self._read()

    def __iter__(self) -> Iterator[ModuleType]:
        return chain.from_iterable(self._packages.values())

    def of(self, package: str) -> list[ModuleType]:
        """The modules of `package`, by the beginning of their names."""
        return self._packages.get(package, [])

    def holding(self, function: Function) -> list[tuple[ModuleType, str]]:
        """Each module that holds `function`, and the name there."""
        if len(sys.modules) != self._count or id(function) not in self._functions:
            self._functions[id(function)] = function
            self._read()
        return [(m, name) for m, name in self._places[id(function)] if vars(m).get(name) is function]

    def replace(self, old: Function, new: Function) -> None:
        """Put `new` in every module that holds `old`."""
        places = self.holding(old)
        for module, name in places:
            vars(module)[name] = new
        self._functions[id(new)] = new
        self._places.setdefault(id(new), []).extend(places)

    def _read(self) -> None:
        self._count = len(sys.modules)
        self._packages: dict[str, list[ModuleType]] = {}
        self._places: dict[int, list[tuple[ModuleType, str]]] = {key: [] for key in self._functions}
        wanted = frozenset(self._places)
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            package = module.__name__.partition(".")[0]
            if package == _OWN_PACKAGE or package in _UNRELATED:
                continue
            self._packages.setdefault(package, []).append(module)
            # Most modules hold none, which is seen sooner so than by a loop over their names.
            if wanted.isdisjoint(map(id, vars(module).values())):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    self._places[id(value)].append((module, name))


def defined_function(patch: Patch) -> Function | None:
    """The function defined by `patch.module`, from any module that still holds it under its own name."""
    value = attribute_of(patch)
    if _is_defined_by(patch, value) or _has_moved(patch, value):
        return value
    held = (module.__dict__.get(patch.attribute) for module in LoadedModules(()))
    return next((value for value in held if _is_defined_by(patch, value)), None)


def attribute_of(patch: Patch) -> Any:
    """The object that the target's module or class itself holds under the target's name, or None."""
    owner: Any = sys.modules[patch.module]
    for part in patch.name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    return None if owner is None else vars(owner).get(patch.attribute)


def owner_of(patch: Patch) -> Any:
    """The module or class in which the target is defined."""
    owner: Any = sys.modules[patch.module]
    for part in patch.name.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner


def holders(function: Function, patch: Patch, owner: Any, loaded: LoadedModules) -> list[str]:
    """The names of the modules that hold `function` under any name; for a method, the method's own full name."""
    if not isinstance(owner, ModuleType):
        return [patch.target] if vars(owner).get(patch.attribute) is function else []
    names = {module.__name__ for module, _ in loaded.holding(function)}
    return sorted(names | {owner.__name__} if vars(owner).get(patch.attribute) is function else names)


def rebind(attribute: str, owner: Any, old: Function, new: Function, loaded: LoadedModules) -> None:
    """Put `new` wherever `old` is held: under this name in its owner and, for a function, in every module."""
    # A submodule of a compiled package is an owner, and not in sys.modules.
    if vars(owner).get(attribute) is old:
        setattr(owner, attribute, new)
    if isinstance(owner, ModuleType):
        loaded.replace(old, new)


def _is_defined_by(patch: Patch, value: Any) -> bool:
    """Whether `value` is the function that `patch.module` defines."""
    if isinstance(value, FunctionType):
        defining = sys.modules[patch.module]
        return value.__code__.co_name == patch.attribute and value.__globals__ is vars(defining)
    # A compiled function has neither code nor globals, so only the names that it states can be compared.
    stated = (getattr(value, "__module__", None), getattr(value, "__name__", None))
    return not patch.signature and stated == (_stated_module(patch), patch.attribute)


def _has_moved(patch: Patch, value: Any) -> bool:
    """Whether `value` is a function of the package that another of its modules defines, and the target's imports."""
    if not isinstance(value, FunctionType) or value.__code__.co_name != patch.attribute:
        return False
    return str(value.__globals__.get("__name__")).partition(".")[0] == patch.package


def _stated_module(patch: Patch) -> str:
    """The module that a compiled function states: `mlx.core.fast` for the name `fast.rope` in `mlx.core`."""
    owner = getattr(sys.modules[patch.module], patch.name.partition(".")[0], None)
    return owner.__name__ if isinstance(owner, ModuleType) else patch.module


logger = logging.getLogger(__name__)

# The errors of a check where upstream has changed: another attribute, another constructor, another shape.
_CHANGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

# The outcomes of this process's checks for records that fit, by their keys.
_known: dict[str, str] = {}


@dataclass
class Fitting:
    """A record that fits the installed function, with the two functions to exchange, and the target's owner."""

    patch: Patch
    version: str
    upstream: Function
    ours: Function
    # It may have left sys.modules when the original is to be restored.
    owner: Any


def fitting(records: list[Patch]) -> Fitting | str | None:
    """Choose the first record of one target that the evidence is for.

    A sentence on the expected and the actual function comes back where none fits, None where the installed version
    needs no replacement.
    """
    first = records[0]
    version = installed(records[0].package)
    if version is None:
        return f"{first.package} does not state its version."
    upstream = defined_function(first)
    if upstream is None:
        if attribute_of(first) is None:
            return f"{first.package} {version} has no such function any more."
        return f"something else has replaced it, and no loaded module holds {first.package}'s own function."
    signature = signature_text(upstream) if isinstance(upstream, FunctionType) else ""
    problem = None
    for patch in records:
        if expected_signature(patch, upstream) not in ("", signature):
            continue
        ours = functools.wraps(upstream)(patch.replacement(upstream))
        problem = _outcome(patch, upstream, ours)
        if problem is None:
            return Fitting(patch, version, upstream, ours, owner_of(patch))
        if problem == SETTLED:
            return None
    expected = " or ".join(dict.fromkeys(expected_signature(patch, upstream) for patch in records))
    return problem or f"its signature is {signature} in {first.package} {version}, and {expected} was expected."


def expected_signature(patch: Patch, upstream: Function) -> str:
    """The signature of the function that a record fits; "" where only its check tells."""
    if patch.signature is not None or not isinstance(upstream, FunctionType):
        return patch.signature or ""
    return signature_text(patch.replacement(upstream))


def signature_text(function: Function) -> str:
    """The signature of a function as text, without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _outcome(patch: Patch, upstream: Function, ours: Function) -> str | None:
    """Return the outcome of the record's check: None if the replacement fits, SETTLED, or the evidence against it."""
    key = _key(patch, upstream)
    if key not in _known:
        remembered = _read(key)
        outcome = _measured(patch, upstream, ours) if remembered is None else remembered
        # Evidence against a replacement is measured again at the next start.
        if outcome not in (None, "", SETTLED):
            return outcome
        _known[key] = outcome or ""
        if remembered is None:
            _write(key, patch, outcome or "")
    return _known[key] or None


def _measured(patch: Patch, upstream: Function, ours: Function) -> str | None:
    # An NVIDIA GPU would have to build kernels for these few numbers, which takes seconds.
    on_cpu = mx.stream(mx.cpu) if backend.builds_kernels() else nullcontext()
    # Neither the user's random numbers nor the counts of served calls know of the check.
    with ExitStack() as stack:
        for context in (not_compiled(), on_cpu, candidates.without_trials(), drawing_from(mx.random.key(0))):
            stack.enter_context(context)
        stack.enter_context(noting_calls())
        try:
            return patch.check(upstream, ours)
        except UserError:
            raise
        except _CHANGED as error:
            return f"a small case of it ends in {type(error).__name__}: {first_line(error).rstrip('.')}."


def forget() -> None:
    """Forget the outcomes of this process's checks. Those in the cache folder remain."""
    _known.clear()
    _modules_digest.cache_clear()


def _key(patch: Patch, upstream: Function) -> str:
    module = getattr(upstream, "__globals__", {}).get("__name__", patch.module)
    # Two records may differ in nothing but the reason, as those of one function of mlx.core do.
    parts = [patch.target, expected_signature(patch, upstream), patch.reason]
    parts += [_modules_digest(module), _machine(), str(mx.default_device())]
    parts += [str(environment.implementation(operator, names)) for operator, names in IMPLEMENTATIONS.items()]
    parts.append(str(environment.tf32()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _modules_digest(name: str) -> str:
    """A digest of the files of a module and of those of its package that its names come from, directly or not."""
    package = name.partition(".")[0]
    visited = set()
    waiting = {name}
    while waiting:
        module = waiting.pop()
        visited.add(module)
        origins = {_origin(value) for value in list(vars(sys.modules[module]).values())}
        inside = {o for o in origins if o.partition(".")[0] == package and isinstance(sys.modules.get(o), ModuleType)}
        waiting |= inside - visited
    return hashlib.sha256("".join(_file_digest(sys.modules[module]) for module in sorted(visited)).encode()).hexdigest()


def _origin(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _file_digest(module: ModuleType) -> str:
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        return ""  # MLX's compiled code is a part of _machine().
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def _machine() -> str:
    """Describe the dependencies of every check: MLX's library, deltatune's operators and records, and the machine."""
    package = Path(__file__).parents[1]
    core = Path(str(mx.__file__))
    files = [core, *core.parent.glob("lib/libmlx.*")]
    files += sorted(file for part in ("ops", "patches") for file in (package / part).rglob("*.py"))
    about = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    device = mx.device_info()
    return "\n".join([*about, str(device.get("device_name", "")), platform.machine(), platform.node()])


def _path(key: str) -> Path:
    return environment.cache_directory() / "evidence" / f"{key}.json"


def _read(key: str) -> str | None:
    """Return a check's outcome in an earlier process: "" or SETTLED; None where there is no file, or a damaged one."""
    try:
        outcome = json.loads(_path(key).read_text())["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return outcome if outcome in ("", SETTLED) else None


def _write(key: str, patch: Patch, outcome: str) -> None:
    """Store the outcome of a check. Where the folder cannot be written, each process checks again."""
    try:
        atomic_files.write(_path(key), json.dumps({"target": patch.target, "outcome": outcome}).encode())
    except OSError as error:
        logger.info("the check of %s cannot be stored (%s): every process checks again", patch.target, error)
