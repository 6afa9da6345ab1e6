"""`deltatune doctor`: what runs here, on what, and whether its gradients are right, measured now."""

from __future__ import annotations

import importlib
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .. import backend, blas
from ..errors import UserError
from ..ops.gated_delta import choice, gated_delta_chunk, verdict
from ..ops.gated_delta.choice import Call, Candidate
from ..ops.gated_delta.tolerances import TF32
from ..ops.gated_delta.verdict import ShapeClass, Verdict
from ..patches import PATCHES, patched
from ..train.report import environment, versions

# chunk against the recurrence, small; the others against chunk, in shapes that models have.
_CHUNK = (
    ShapeClass(2, 4, 64, 64, "float32"),
    ShapeClass(2, 4, 64, 64, "bfloat16", masked=True, segmented=True),
    ShapeClass(2, 2, 32, 32, "float32", per_channel=True),
)
_MODELS = (
    ShapeClass(16, 16, 128, 128, "bfloat16"),
    ShapeClass(16, 32, 128, 128, "bfloat16", segmented=True),
    ShapeClass(16, 16, 128, 128, "float32", masked=True),
    ShapeClass(32, 32, 128, 128, "bfloat16", per_channel=True),
)


@dataclass
class Finding:
    """One implementation on one class of shapes: `status` right, TF32, wrong, refused or not covered; why."""

    implementation: str
    shape: str
    status: str
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    bound: float | None = None


@dataclass
class Examination:
    """All that the doctor found. `wrong`: whether training here would compute wrong gradients."""

    versions: dict[str, str]
    environment: dict[str, str]
    machine: dict[str, str]
    gated_delta: str
    findings: list[Finding]
    patches: list[str]
    left_alone: list[str]

    @property
    def wrong(self) -> bool:
        return any(finding.status == "wrong" for finding in self.findings)


def examine() -> Examination:
    """Look at everything; some seconds, more where kernels are compiled for the first time."""
    names, why = backend.gated_delta_candidates()
    findings = [_chunk(shape) for shape in _CHUNK]
    for name in ("fused", "native"):
        if name in names or backend.device() != "cpu":
            findings += [_fast(name, shape, forced=names == (name,)) for shape in _MODELS]
    applied, left_alone = _patches()
    status = blas.status()
    about = environment() | {"BLAS": f"{status.name}: {status.detail}"}
    if status.threads:
        about["BLAS threads"] = str(status.threads)
    chosen = f"{', then '.join(names)} ({why})"
    return Examination(versions(), about, verdict.machine(), chosen, findings, applied, left_alone)


def _chunk(shape: ShapeClass) -> Finding:
    found = verdict.measure("chunk", gated_delta_chunk, shape, by_recurrence=True)
    finding = _finding(found, "right" if found.passed else "wrong")
    if not found.passed and backend.device() == "cuda" and max(found.errors.values(), default=math.inf) <= TF32:
        finding.status = "TF32"
        finding.detail += "; MLX multiplies fp32 in TF32 on this GPU unless MLX_ENABLE_TF32=0 is set"
    return finding


def _fast(name: str, shape: ShapeClass, forced: bool) -> Finding:
    candidate = choice.CANDIDATES[name](_call(shape))
    if isinstance(candidate, str):
        return Finding(name, str(shape), "not covered", candidate)
    return _checked(name, candidate, forced)


def _checked(name: str, candidate: Candidate, forced: bool) -> Finding:
    """One that fails is not used, unless it is forced: then training does not start."""
    if candidate.shape is None or candidate.checked is None:
        raise AssertionError(f"{name} has a check")
    found = verdict.again(name, candidate.checked, candidate.shape)
    return _finding(found, "right" if found.passed else "wrong" if forced else "refused")


def _finding(found: Verdict, status: str) -> Finding:
    return Finding(found.implementation, found.shape, status, str(found), found.errors, found.bound)


def _call(shape: ShapeClass) -> Call:
    """Arguments of one token in this class."""
    dtype = getattr(mx, shape.dtype)
    q = mx.zeros((1, 1, shape.key_heads, shape.key_size), dtype)
    v = mx.zeros((1, 1, shape.value_heads, shape.value_size), dtype)
    gates = (1, 1, shape.value_heads, shape.key_size) if shape.per_channel else (1, 1, shape.value_heads)
    return Call(q, q, v, mx.zeros(gates), shape.masked, shape.segmented)


def _patches() -> tuple[list[str], list[str]]:
    """What the patches reach in the packages that are installed, and what they leave alone."""
    absent = []
    for module in sorted({patch.module for patch in PATCHES}):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent.append(f"{module} is not installed ({error})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with patched() as report:
                return [str(each) for each in report.applied], [*report.left_alone, *absent]
    except UserError as error:
        # A patch tries its replacement, and the implementation that is forced may refuse to run.
        return [], [str(error), *absent]


def text(found: Examination) -> str:
    """For a person, without line breaks inside a fact."""
    lines = ["Versions: " + ", ".join(f"{name} {version}" for name, version in found.versions.items())]
    lines += [f"{name}: {value}" for name, value in found.environment.items()]
    lines += [f"GPU or CPU: {found.machine['device']} {found.machine['driver']}".rstrip()]
    lines += [f"Gated delta: {found.gated_delta}"]
    for finding in found.findings:
        shown = finding.detail if finding.status != "not covered" else f"{finding.implementation} ({finding.shape}): "
        lines.append(f"  [{finding.status}] {shown}{finding.detail if finding.status == 'not covered' else ''}")
    lines += [f"Patch: {each}" for each in found.patches] or ["Patch: none applies"]
    lines += [f"Left alone: {each}" for each in found.left_alone]
    if found.wrong:
        lines.append("Something here would train wrong: see [wrong] above, and please report it with --json.")
    else:
        lines.append("Nothing here would train wrong.")
    return "\n".join(lines)


def as_json(found: Examination) -> str:
    """The same for a program; an error that is no number stands as a string."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    whole = {name: value for name, value in vars(found).items() if name != "findings"}
    whole |= {"findings": [vars(finding) for finding in found.findings], "wrong": found.wrong}
    return json.dumps(plain(whole), indent=1, allow_nan=False)


def run(machine_readable: bool = False) -> int:
    """Examine, print, and return the exit code: 1 if training here would compute wrong gradients."""
    found = examine()
    print(as_json(found) if machine_readable else text(found))
    return int(found.wrong)
