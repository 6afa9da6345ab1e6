"""Verdicts on fast implementations: whether each agrees with a slower one on this machine, and its time.

case.py measures them. Here they are remembered, and stored in the cache folder for later processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...machine import atomic_files, backend, environment
from ...machine.packages import versions
from .timing import TrialTime

logger = logging.getLogger(__name__)

_PACKAGES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def part(error: float, bound: float) -> float:
    """Return error / bound; for a bound of 0 (exact copies), 0 or infinity."""
    if not bound:
        return math.inf if error else 0.0
    return error / bound


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        implementation: The name of the implementation.
        shape: The class of shapes, as text.
        bound: The largest error that is allowed.
        errors: By name of an output or gradient, its largest error relative to the reference's largest element.
        problem: The message of the error that stopped the check, if one did.
        reference: The name of the implementation that it was compared with.
        bounds: By name of a result, the largest error that is allowed where it is not `bound`.
        seconds: The shortest time of a forward and a backward pass on the check's arrays; None before it is timed.
        same_bits: Whether all timed runs gave the same bits; None before it is timed.
        moments: When each process timed it, and the load of the machine then.
    """

    implementation: str
    shape: str
    bound: float
    errors: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    reference: str = "chunk"
    bounds: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    same_bits: bool | None = None
    moments: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        within = (error <= self.bound_of(name) for name, error in self.errors.items())
        return self.problem is None and bool(self.errors) and all(within)

    @property
    def worst(self) -> str:
        """The name of the result with the largest error relative to its bound."""
        return max(self.errors, key=lambda name: part(self.errors[name], self.bound_of(name)))

    def bound_of(self, name: str) -> float:
        """Return the largest error that is allowed for the result `name`."""
        return self.bounds.get(name, self.bound)

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.implementation} ({self.shape}) does not run: {self.problem}"
        worst = self.worst
        relation = "agrees with" if self.passed else "differs from"
        by = f"{worst} by {self.errors[worst]:.1e} of the largest, {self.bound_of(worst):.1e} allowed"
        return f"{self.implementation} ({self.shape}) {relation} {self.reference}: {by}"


# In the error of a kernel's text that Metal's compiler refuses, as it will again until a version changes.
_REFUSED = "Unable to build metal library from source"
# A time from one bad moment, when the machine was hot or busy, would decide for ever: so many processes take it anew.
_STARTS = 3
# By the name of an implementation and a class of shapes.
_known: dict[tuple[str, Any], Verdict] = {}
# Those that this process has timed.
_timed: set[tuple[str, Any]] = set()


def of(name: str, shape: Any, measure: Callable[[], Verdict]) -> Verdict:
    """Return the verdict on an implementation for a class of calls, a dataclass: the stored or a new one."""
    if (name, shape) not in _known:
        _known[name, shape] = _read(path_of(name, shape)) or again(name, shape, measure)
    return _known[name, shape]


def remembered(name: str, shape: Any) -> Verdict | None:
    """Return the verdict of this process, or else the stored one; None if there is none. Arguments are as in `of`."""
    return _known.get((name, shape)) or _read(path_of(name, shape))


def again(name: str, shape: Any, measure: Callable[[], Verdict]) -> Verdict:
    """Measure now, whatever verdict is stored, and store the new one. Arguments and result are those of `of`."""
    verdict = _known[name, shape] = of_refused(measure(), name, shape)
    # Another check that was stopped is not stored: the cause may be gone the next time.
    if verdict.problem is None:
        _write(path_of(name, shape), verdict)
    return verdict


def of_refused(verdict: Verdict, name: str, shape: Any) -> Verdict:
    """Return the verdict; that on a kernel which Metal's compiler refuses in one line, stored, its log beside it."""
    if verdict.problem is None or _REFUSED not in verdict.problem:
        return verdict
    path = path_of(name, shape)
    verdict = _with_log(verdict, path.with_suffix(".log"))
    _write(path, verdict)
    return verdict


def _with_log(verdict: Verdict, path: Path) -> Verdict:
    """Write the compiler's messages to a file, and return the verdict with the first error in one line."""
    text = verdict.problem or ""
    first = next((line.strip() for line in text.splitlines() if " error: " in line), text.partition("\n")[0])
    try:
        atomic_files.write(path, text.encode())
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        return replace(verdict, problem=f"Metal's compiler refuses it: {first}")
    return replace(verdict, problem=f"Metal's compiler refuses it: {first} (all that it says is in {path})")


def wants_time(name: str, shape: Any, verdict: Verdict) -> bool:
    """Whether an implementation is to be timed now: it has no time, or this process is one of the first _STARTS."""
    return verdict.seconds is None or (len(verdict.moments) < _STARTS and (name, shape) not in _timed)


def timed(name: str, shape: Any, verdict: Verdict, measured: TrialTime) -> Verdict:
    """Return `verdict` with the shorter of its time and that which was measured now, and store it."""
    _timed.add((name, shape))
    seconds = measured.seconds if verdict.seconds is None else min(verdict.seconds, measured.seconds)
    same_bits = measured.same_bits and verdict.same_bits is not False
    moment = f"{datetime.now():%Y-%m-%d %H:%M}, load {os.getloadavg()[0]:.1f}"
    with_times = replace(verdict, seconds=seconds, same_bits=same_bits, moments=[*verdict.moments, moment])
    _known[name, shape] = with_times
    _write(path_of(name, shape), with_times)
    return with_times


def forget() -> None:
    """Forget the verdicts of this process. Those in the cache folder remain."""
    _known.clear()
    _timed.clear()


def machine() -> dict[str, str]:
    """Return the key of a verdict: versions, the text of the kernels, MLX's default device and its driver."""
    return _machine(backend.device())


@cache
def _machine(device: str) -> dict[str, str]:
    parts = {"backend": device, **versions((*_PACKAGES, "deltatune"))}
    parts["mlx"] = mx.__version__  # type: ignore[attr-defined]
    about = mx.device_info()
    parts |= {"text": digest_of_text(Path(__file__).parents[1]), "device": str(about.get("device_name", about))}
    parts |= {"system": platform.platform(), "driver": _driver()}
    return parts


def digest_of_text(operators: Path) -> str:
    """Return a digest of the code and the kernels' texts that verdicts are about, in the folder of operators."""
    digest = hashlib.sha256()
    for folder in ("gated_delta", "attention", "kernels", "operator", "products"):
        for file in sorted((operators / folder).rglob("*")):
            if file.suffix in (".py", ".h"):
                digest.update(file.relative_to(operators).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _driver() -> str:
    """Return the version of NVIDIA's driver. Apple's is part of the system's version."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().partition("\n")[0] if path.is_file() else ""


def path_of(name: str, shape: Any) -> Path:
    """Return where the verdict on implementation `name` for `shape` is stored."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

    return environment.cache_directory() / "verdicts" / digest(machine()) / f"{name}-{digest(asdict(shape))}.json"


def _read(path: Path) -> Verdict | None:
    """Return the verdict that is stored at `path`, or None where there is none or it is damaged."""
    try:
        return Verdict(**json.loads(path.read_text())["verdict"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("%s cannot be read (%s): checking again", path, error)
        return None


def _write(path: Path, verdict: Verdict) -> None:
    """Store a verdict for later processes. Where the folder cannot be written, each of them checks again."""
    text = json.dumps({"verdict": asdict(verdict), "machine": machine()}, indent=1)
    try:
        atomic_files.write(path, text.encode())
    except OSError as error:
        logger.warning("a verdict cannot be stored (%s): every process checks again", error)
