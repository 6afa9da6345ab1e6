"""Finds the record that fits the installed function, of any version: by its signature and its check.

A passed check is remembered in the cache folder, by the text of the function's modules, of MLX, of deltatune and of the
machine. So a second start asks nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import platform
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
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
from . import callers
from .holders import attribute_of, defined_function, owner_of
from .patch_record import SETTLED, Function, Patch
from .versions import contains, installed, latest

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
    """Choose a record of one target by the evidence; the versions decide only which record is asked first.

    A sentence on the expected and the actual function comes back where none fits, None where the installed version
    needs no replacement.
    """
    first = records[0]
    version = installed(records[0].package)
    if version is None:
        return f"{first.package} does not state its version."
    candidates = sorted(records, key=lambda patch: _distance(patch, version))
    upstream = defined_function(first)
    if upstream is None:
        return _absent(first, version)
    signature = signature_text(upstream) if isinstance(upstream, FunctionType) else ""
    problem = None
    for patch in candidates:
        if expected_signature(patch, upstream) not in ("", signature):
            continue
        ours = functools.wraps(upstream)(patch.replacement(upstream))
        problem = _outcome(patch, upstream, ours)
        if problem is None:
            return Fitting(patch, version, upstream, ours, owner_of(patch))
        if problem == SETTLED:
            return None
    expected = " or ".join(dict.fromkeys(expected_signature(patch, upstream) for patch in candidates))
    return problem or f"its signature is {signature} in {first.package} {version}, and {expected} was expected."


def expected_signature(patch: Patch, upstream: Function) -> str:
    """The signature of the function that a record fits; "" where only its check tells."""
    if patch.signature is not None or not isinstance(upstream, FunctionType):
        return patch.signature or ""
    return signature_text(patch.replacement(upstream))


def _distance(patch: Patch, version: str) -> tuple[bool, int]:
    """Where a record stands among those to ask: first those that were tried with the version, then the newest."""
    newest = tuple(int(part) for part in latest([patch.tried]).split(".") if part.isdigit())
    return not contains(patch.tried, version), -sum(part * 10**6 // 1000**at for at, part in enumerate(newest))


def _absent(patch: Patch, version: str) -> str:
    if attribute_of(patch) is None:
        return f"{patch.package} {version} has no such function any more."
    return f"something else has replaced it, and no loaded module holds {patch.package}'s own function."


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
        stack.enter_context(callers.noting())
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
    parts = [patch.target, patch.tried, expected_signature(patch, upstream), patch.reason]
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
