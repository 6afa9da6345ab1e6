"""Whether an implementation computes on this machine what `chunk` computes: measured once, and kept."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ... import environment, kept
from .chunk import gated_delta_chunk
from .naive import gated_delta_naive
from .tolerances import EASY, ROUNDING, fused_bound

logger = logging.getLogger(__name__)

NAMES = ("y", "state", "dq", "dk", "dv", "dlog_g", "dbeta", "dinitial_state")
# Two batches, and more than two chunks of any implementation, the last one ragged.
BATCH, LENGTH = 2, 150
# Key heads that the reference computes. The implementation gets as many as the class has, each a copy of one of them:
# which, is drawn, so a head that reads or writes another's place shows.
_DRAWN = 2
# Whose heads an array has, and where: (key heads, axis 2), (value heads, axis 2), or a state's value heads, axis 1.
_PRIMALS, _COTANGENTS = "kkvvvs", "vs"
_PACKAGES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
Implementation = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class ShapeClass:
    """What decides which kernel a call runs, and nothing that does not: neither its batch nor its length.

    `cut`: how the implementation divides the work, in words of its own.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: str
    masked: bool = False
    segmented: bool = False
    per_channel: bool = False
    cut: str = ""

    def __str__(self) -> str:
        heads = f"{self.key_heads}/{self.value_heads} heads of {self.key_size} x {self.value_size}"
        options = [name for name in ("masked", "segmented", "per_channel") if getattr(self, name)]
        return ", ".join([self.dtype, heads, *(option.replace("_", "-") for option in options)])


@dataclass(frozen=True)
class Verdict:
    """Errors are the largest over the largest element of `reference`'s; `problem` is what stopped the check."""

    implementation: str
    shape: str
    bound: float
    errors: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    reference: str = "chunk"

    @property
    def passed(self) -> bool:
        return self.problem is None and bool(self.errors) and all(x <= self.bound for x in self.errors.values())

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.implementation} ({self.shape}) does not run: {self.problem}"
        worst = max(self.errors, key=lambda name: self.errors[name])
        relation = "agrees with" if self.passed else "differs from"
        by = f"{worst} by {self.errors[worst]:.1e} of the largest, {self.bound:.1e} allowed"
        return f"{self.implementation} ({self.shape}) {relation} {self.reference}: {by}"


_known: dict[tuple[str, ShapeClass], Verdict] = {}


def of(name: str, function: Implementation, shape: ShapeClass) -> Verdict:
    """The verdict on `function` for calls of this class: as found before on this machine, else measured now.

    Measured with arrays of its own, evaluated at once: safe while something else is being traced.
    """
    key = (name, shape)
    if key not in _known:
        _known[key] = read(path_of(name, shape)) or again(name, function, shape)
    return _known[key]


def again(name: str, function: Implementation, shape: ShapeClass) -> Verdict:
    """The same, measured now whatever was found before."""
    found = _known[(name, shape)] = measure(name, function, shape)
    # What stopped a check may be gone the next time.
    if found.problem is None:
        write(path_of(name, shape), found)
    return found


def forget() -> None:
    """Forget the verdicts of this process; those in the cache folder stay."""
    _known.clear()


def measure(name: str, function: Implementation, shape: ShapeClass, *, by_recurrence: bool = False) -> Verdict:
    """Compare `function` with chunk (or naive), in fp32 on the CPU: forward and backward, gates of 0 among them."""
    started = time.perf_counter()
    case = _case(shape)
    reference = gated_delta_naive if by_recurrence else gated_delta_chunk
    bound = EASY + ROUNDING[shape.dtype] if by_recurrence else fused_bound(EASY, shape.dtype)
    blank = Verdict(name, str(shape), bound, reference="naive" if by_recurrence else "chunk")
    # The CPU's products are fp32; a GPU's may be TF32.
    with mx.stream(mx.cpu):
        few = _differentiate(reference, case.few_primals, case.constants, case.few_cotangents)
    expected = _spread(few, _COTANGENTS + _PRIMALS, case)
    of_reference = time.perf_counter() - started
    try:
        results = _differentiate(function, case.primals, case.constants, case.cotangents)
    except (RuntimeError, ValueError) as error:
        return replace(blank, problem=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    logger.info("gated_delta: %s checked in %.1f s, %.1f of them the reference's", name, seconds, of_reference)
    pairs = zip(NAMES, results, expected, strict=True)
    return replace(blank, errors={name: _error(result, exact) for name, result, exact in pairs})


def _differentiate(function: Implementation, primals: list, constants: dict, cotangents: list) -> list[np.ndarray]:
    def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return function(*arrays[:-1], initial_state=arrays[-1], **constants)

    outputs, gradients = mx.vjp(call, primals, cotangents)
    wide = [x.astype(mx.float32) for x in (*outputs, *gradients)]
    mx.eval(wide)
    return [np.array(x) for x in wide]


def _error(result: np.ndarray, expected: np.ndarray) -> float:
    """Not a number, or of another shape, counts as infinitely wrong."""
    if result.shape != expected.shape or not np.isfinite(result).all():
        return float("inf")
    error, largest = np.abs(result - expected).max(), np.abs(expected).max()
    return float(error / largest) if largest > 0 else float("inf" if error > 0 else 0.0)


class _Case(NamedTuple):
    """What the implementation is given, in its dtype; the few heads it was made of, in fp32; and where each went."""

    primals: list[mx.array]
    cotangents: list[mx.array]
    few_primals: list[mx.array]
    few_cotangents: list[mx.array]
    constants: dict[str, mx.array | None]
    key_heads: np.ndarray
    value_heads: np.ndarray


def _case(shape: ShapeClass) -> _Case:
    """Drawn by NumPy: MLX's random state belongs to the training."""
    draw = np.random.default_rng(0)
    drawn, repeats = min(_DRAWN, shape.key_heads), shape.value_heads // shape.key_heads
    which = np.concatenate([np.arange(drawn), draw.integers(drawn, size=shape.key_heads - drawn)])
    floats = _floats(draw, replace(shape, key_heads=drawn, value_heads=drawn * repeats))
    dtype = getattr(mx, shape.dtype)
    few = [mx.array(x.astype(np.float32)) for x in floats]
    for index in (0, 1, 2, 6):
        few[index] = few[index].astype(dtype)
    mask = np.ones((BATCH, LENGTH), bool)
    mask[0, LENGTH // 3 : LENGTH // 2], mask[1, :9] = False, False
    segments = np.cumsum(draw.uniform(size=(BATCH, LENGTH)) < 0.03, axis=1).astype(np.int32)
    constants = {
        "mask": mx.array(mask) if shape.masked else None,
        "segments": mx.array(segments) if shape.segmented else None,
    }
    value_heads = (which[:, None] * repeats + np.arange(repeats)).reshape(-1)
    wide = [x.astype(mx.float32) for x in few]
    case = _Case([], [], wide[:6], wide[6:], constants, which, value_heads)
    whole = _spread([np.array(x) for x in wide], _PRIMALS + _COTANGENTS, case)
    arrays = [mx.array(x).astype(small.dtype) for x, small in zip(whole, few, strict=True)]
    return case._replace(primals=arrays[:6], cotangents=arrays[6:])


def _floats(draw: np.random.Generator, shape: ShapeClass) -> list[np.ndarray]:
    """q, k, v, log_g, beta, the initial state; then the gradients of y and of the final state."""
    keys, values = (
        (BATCH, LENGTH, shape.key_heads, shape.key_size),
        (BATCH, LENGTH, shape.value_heads, shape.value_size),
    )
    k = draw.normal(size=keys)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = (*values[:3], shape.key_size) if shape.per_channel else values[:3]
    kind = draw.uniform(size=gates)
    usual = -np.exp(1.5 * draw.normal(size=gates) - 2.0)
    log_g = np.select([kind < 0.02, kind < 0.05, kind < 0.3], [-np.inf, np.log(1e-12), 0.0], usual)
    state = (BATCH, shape.value_heads, shape.value_size, shape.key_size)
    floats = [draw.normal(size=keys) * shape.key_size**-0.5, k, draw.normal(size=values)]
    floats += [log_g, draw.uniform(0.05, 0.95, size=values[:3]), draw.normal(size=state)]
    return [*floats, draw.normal(size=values), draw.normal(size=state)]


def _spread(arrays: Sequence[np.ndarray], kinds: str, case: _Case) -> list[np.ndarray]:
    """The few heads' arrays with the heads of the class. A gradient of a copy is a copy of the gradient."""
    heads = {"k": (case.key_heads, 2), "v": (case.value_heads, 2), "s": (case.value_heads, 1)}
    return [np.take(x, *heads[kind]) for x, kind in zip(arrays, kinds, strict=True)]


@cache
def machine() -> dict[str, str]:
    """What a verdict depends on: versions, the text of the kernels, the device and its driver."""
    found = {}
    for name in (*_PACKAGES, "deltatune"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["mlx"] = mx.__version__  # type: ignore[attr-defined]
    text = hashlib.sha256()
    operators = files(__package__.rpartition(".")[0])
    for folder in (operators / name for name in ("gated_delta", "attention", "kernels")):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".h")):
                text.update(file.name.encode() + file.read_bytes())
    about = mx.device_info()
    found |= {"text": text.hexdigest()[:16], "device": str(about.get("device_name", about))}
    found |= {"system": platform.platform(), "driver": _driver()}
    return found


def _driver() -> str:
    """NVIDIA's kernel module; Apple's driver comes with the system."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().partition("\n")[0] if path.is_file() else ""


def path_of(name: str, shape: Any) -> Path:
    """Where the verdict on implementation `name` for `shape`, a dataclass of an operator's own, is kept."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

    return environment.cache_directory() / "verdicts" / digest(machine()) / f"{name}-{digest(asdict(shape))}.json"


def read(path: Path) -> Verdict | None:
    """The verdict kept at `path`; None where there is none, or it is damaged."""
    try:
        return Verdict(**json.loads(path.read_text())["verdict"])
    except FileNotFoundError:
        return None
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        logger.info("%s cannot be read (%s): checking again", path, error)
        return None


def write(path: Path, verdict: Verdict) -> None:
    """Keep a verdict for the processes to come; where the folder cannot be written, each of them measures again."""
    text = json.dumps({"verdict": asdict(verdict), "machine": machine()}, indent=1)
    try:
        kept.write(path, text.encode())
    except OSError as error:
        logger.warning("a verdict cannot be kept (%s): it is measured again in every process", error)
