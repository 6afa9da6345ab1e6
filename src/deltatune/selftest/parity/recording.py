"""Reference trajectories: written from a live transformers run, read back where there is no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import seeded, vision
from .cases import ADAPTER_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE, STEPS, Adapters, ParityCase, ParityRun
from .families import Weights
from .vision import VisionCase

FOLDER = Path(__file__).parent / "recorded"
PROJECTIONS = 6


@dataclass(frozen=True)
class Difference:
    """How far a run is from the reference: the largest over steps or tensors, and where.

    loss: absolute. gradient: of the first step, relative to itself. adapter: after the last, relative to how far
    training moved it.
    """

    loss: float
    step: int
    gradient: float
    gradient_of: str
    adapter: float
    adapter_of: str

    @property
    def small(self) -> bool:
        return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE and self.adapter <= ADAPTER_TOLERANCE


class Tensor(NamedTuple):
    """What is kept of a tensor: projections on seeded signs, and the length that its error is measured by."""

    projections: list[float]
    length: float


def flat(adapters: Adapters) -> dict[str, np.ndarray]:
    return {
        f"{path}.{key}": value.astype(np.float64) for path, found in adapters.items() for key, value in found.items()
    }


def project(name: str, value: np.ndarray) -> np.ndarray:
    return seeded.signs(name, PROJECTIONS, value.size) @ value.ravel()


def summary(adapters: Adapters, start: Adapters | None = None) -> dict[str, Tensor]:
    """Of every tensor; its length is that of the way from `start`, or its own."""
    starts = {} if start is None else flat(start)
    return {
        name: Tensor(
            [float(f"{x:.9g}") for x in project(name, value)],
            float(f"{np.linalg.norm(value - starts.get(name, 0.0)):.6g}"),
        )
        for name, value in flat(adapters).items()
    }


def _worst(reference: dict[str, Tensor], adapters: Adapters) -> tuple[float, str]:
    found = flat(adapters)
    if set(found) != set(reference):
        raise ValueError(f"other adapters than recorded: {sorted(set(found) ^ set(reference))}")
    errors = {
        name: np.sqrt(np.mean((project(name, found[name]) - kept.projections) ** 2)) / kept.length
        for name, kept in reference.items()
    }
    name = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return float(errors[name]), name


def checksums(weights: Weights) -> dict[str, str]:
    """What both sides start from: the checkpoint as drawn, and the batches of every step."""
    rows = [seeded.batch(step) for step in range(STEPS)]
    batches = {f"{step}.tokens": row.tokens for step, row in enumerate(rows)}
    batches |= {f"{step}.counts": row.counts for step, row in enumerate(rows)}
    return {"checkpoint": seeded.checksum(weights), "batches": seeded.checksum(batches)}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def write(name: str, content: dict[str, Any]) -> None:
    """One key a line at the top, the rest compact: small, and still readable in a diff."""
    path_of(name).parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


@dataclass(frozen=True)
class Recording:
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    targets: dict[str, tuple[int, int]]
    checksums: dict[str, str]
    losses: list[float]
    gradients: dict[str, Tensor]
    adapters: dict[str, Tensor]

    def weights(self, case: ParityCase | VisionCase) -> Weights:
        """The checkpoint drawn again; ValueError where it or the batches are not those of the recording."""
        if isinstance(case, ParityCase):
            weights = case.family.weights(self.shapes)
            found = checksums(weights)
        else:
            weights = case.weights(self.shapes)
            found = vision.checksums(weights, case.videos)
        if found != self.checksums:
            raise ValueError("this machine draws another checkpoint or other batches than the recording had")
        return weights

    def compare(self, run: ParityRun) -> Difference:
        """How far a run is from the recorded one; ValueError where it trained other adapters."""
        gaps = np.abs(np.subtract(run.losses, self.losses))
        step = int(np.argmax(gaps))
        return Difference(
            float(gaps[step]), step, *_worst(self.gradients, run.gradients), *_worst(self.adapters, run.final)
        )


def read(name: str) -> Recording:
    content = json.loads(path_of(name).read_text())
    return Recording(
        content["config"],
        {key: tuple(value) for key, value in content["shapes"].items()},
        {key: (value[0], value[1]) for key, value in content["targets"].items()},
        content["checksums"],
        content["losses"],
        {key: Tensor(*value) for key, value in content["gradients"].items()},
        {key: Tensor(*value) for key, value in content["adapters"].items()},
    )
