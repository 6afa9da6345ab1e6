"""Reference trajectories: written from a live transformers run, read back where there is no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import seeded
from .cases import STEPS, Adapters, Case
from .families import Weights

FOLDER = Path(__file__).parent.parent / "recorded"
PROJECTIONS = 8


@dataclass(frozen=True)
class Difference:
    """loss: largest over the steps. adapter: largest over tensors, relative to how far training moved each."""

    loss: float
    step: int
    adapter: float
    tensor: str


@dataclass(frozen=True)
class Tensor:
    """What is kept of a final adapter: its projections, and the length of its way there."""

    projections: list[float]
    moved: float


def project(name: str, value: np.ndarray) -> np.ndarray:
    return seeded.signs(name, PROJECTIONS, value.size) @ value.astype(np.float64).ravel()


def summary(initial: Adapters, final: Adapters) -> dict[str, Tensor]:
    kept = {}
    for path, values in final.items():
        for key, value in values.items():
            way = np.linalg.norm(value.astype(np.float64) - initial[path][key])
            name = f"{path}.{key}"
            kept[name] = Tensor([float(f"{x:.9g}") for x in project(name, value)], float(f"{way:.6g}"))
    return kept


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
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


@dataclass(frozen=True)
class Recording:
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    targets: dict[str, tuple[int, int]]
    checksums: dict[str, str]
    losses: list[float]
    adapters: dict[str, Tensor]

    def weights(self, case: Case) -> Weights:
        """The checkpoint drawn again; ValueError where it or the batches are not those of the recording."""
        weights = case.family.weights(self.shapes)
        if checksums(weights) != self.checksums:
            raise ValueError("this machine draws another checkpoint or other batches than the recording had")
        return weights

    def compare(self, losses: list[float], final: Adapters) -> Difference:
        """How far a run is from the recorded one; ValueError where it has other adapters."""
        gaps = np.abs(np.subtract(losses, self.losses))
        found = {f"{path}.{key}": value for path, values in final.items() for key, value in values.items()}
        if set(found) != set(self.adapters):
            raise ValueError(f"other adapters than recorded: {sorted(set(found) ^ set(self.adapters))}")
        worst, tensor = 0.0, ""
        for name, reference in self.adapters.items():
            error = project(name, found[name]) - reference.projections
            relative = float(np.sqrt(np.mean(error**2)) / reference.moved)
            if not relative <= worst:
                worst, tensor = relative, name
        step = int(np.argmax(gaps))
        return Difference(float(gaps[step]), step, worst, tensor)


def read(name: str) -> Recording:
    content = json.loads(path_of(name).read_text())
    return Recording(
        content["config"],
        {key: tuple(value) for key, value in content["shapes"].items()},
        {key: (value[0], value[1]) for key, value in content["targets"].items()},
        content["checksums"],
        content["losses"],
        {key: Tensor(**value) for key, value in content["adapters"].items()},
    )
