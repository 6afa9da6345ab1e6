"""Writes reference runs of transformers to files, and reads them where torch is not installed."""

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
    """The largest differences between a run and its reference, with the step of the loss and the names of the others.

    A gradient's is relative to its norm, and a final adapter's to the norm of its change in training.
    """

    loss: float
    step: int
    gradient: float
    gradient_of: str
    adapter: float
    adapter_of: str

    @property
    def small(self) -> bool:
        """Whether all three are within their tolerances."""
        return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE and self.adapter <= ADAPTER_TOLERANCE


class Tensor(NamedTuple):
    """The recording of a tensor: its projections on seeded signs, and the norm to which its error relates."""

    projections: list[float]
    length: float


def flat(adapters: Adapters) -> dict[str, np.ndarray]:
    """The adapters' tensors in float64, by `path.key`."""
    return {
        f"{path}.{key}": value.astype(np.float64)
        for path, tensors in adapters.items()
        for key, value in tensors.items()
    }


def project(name: str, value: np.ndarray) -> np.ndarray:
    """The projections of the tensor `name` on its seeded signs."""
    return seeded.signs(name, PROJECTIONS, value.size) @ value.ravel()


def summary(adapters: Adapters, start: Adapters | None = None) -> dict[str, Tensor]:
    """The recording of every tensor; `length` is the norm of its change from `start`, or its own norm without one."""
    starts = {} if start is None else flat(start)
    return {
        name: Tensor(
            [float(f"{x:.9g}") for x in project(name, value)],
            float(f"{np.linalg.norm(value - starts.get(name, 0.0)):.6g}"),
        )
        for name, value in flat(adapters).items()
    }


def worst(reference: dict[str, Tensor], adapters: Adapters) -> tuple[float, str]:
    """The largest error of a tensor, relative to its recorded length, and the tensor's name."""
    trained = flat(adapters)
    if set(trained) != set(reference):
        difference = sorted(set(trained) ^ set(reference))
        raise ValueError(f"the run trains other adapters than the recording; they differ by {difference}")
    errors = {
        name: np.sqrt(np.mean((project(name, trained[name]) - tensor.projections) ** 2)) / tensor.length
        for name, tensor in reference.items()
    }
    name = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return float(errors[name]), name


def checksums(weights: Weights) -> dict[str, str]:
    """Checksums of the start that both sides share: the drawn checkpoint and the batches of every step."""
    rows = [seeded.batch(step) for step in range(STEPS)]
    batches = {f"{step}.tokens": row.tokens for step, row in enumerate(rows)}
    batches |= {f"{step}.counts": row.counts for step, row in enumerate(rows)}
    return {"checkpoint": seeded.checksum(weights), "batches": seeded.checksum(batches)}


def path_of(name: str) -> Path:
    """The file of the recording `name`."""
    return FOLDER / f"{name}.json"


def write(name: str, content: dict[str, Any]) -> None:
    """Write a recording as JSON with one line for each top-level key, which is small and readable in a diff."""
    path_of(name).parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


@dataclass(frozen=True)
class Recording:
    """A recorded run of transformers and PEFT; `targets` has (inputs, outputs) of the adapted modules by their paths.

    The losses are those of every step, the gradients of the first step, and the adapters those after the last.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    targets: dict[str, tuple[int, int]]
    checksums: dict[str, str]
    losses: list[float]
    gradients: dict[str, Tensor]
    adapters: dict[str, Tensor]

    def weights(self, case: ParityCase | VisionCase) -> Weights:
        """Draw the checkpoint again; ValueError if it or the batches are not those of the recording."""
        if isinstance(case, ParityCase):
            weights = case.family.weights(self.shapes)
            drawn = checksums(weights)
        else:
            weights = case.weights(self.shapes)
            drawn = vision.checksums(weights, case.videos)
        if drawn != self.checksums:
            raise ValueError("this machine draws another checkpoint or other batches than the recording had")
        return weights

    def compare(self, run: ParityRun) -> Difference:
        """Compare a run with the recorded one; ValueError if the run trained other adapters."""
        gaps = np.abs(np.subtract(run.losses, self.losses))
        step = int(np.argmax(gaps))
        return Difference(
            float(gaps[step]), step, *worst(self.gradients, run.gradients), *worst(self.adapters, run.final)
        )


def read(name: str) -> Recording:
    """Read the recording `name`."""
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
