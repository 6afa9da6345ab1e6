"""Compares an implementation with a recurrence in float64; no time is printed for one that differs.

The recurrence is that of src/deltatune/ops/gated_delta/float64.py, on the first tokens. The implementation runs on
every row and head. The recurrence runs on the first and last rows and key heads, since rows and heads are independent.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sizes import FLOATS, Size, inputs

CHECKED = 256
NAMES = ("y", *FLOATS)
# fp32: largest error over largest element; implementations whose decays are differences of sums reach about 1e-5.
# bf16: norm of the error over the norm; rounding alone gives 2e-3, and wrong results give 1e-2 or more.
AGREES = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Errors:
    """The errors of y and of each gradient: largest error over largest element, and norm of the error over the norm."""

    dtype: str
    largest: dict[str, float]
    norm: dict[str, float]

    @property
    def decisive(self) -> dict[str, float]:
        return self.largest if self.dtype == "float32" else self.norm

    @property
    def worst(self) -> tuple[str, float]:
        """The name and the value of the largest error; NaN counts as the largest."""
        name = max(self.decisive, key=lambda name: np.nan_to_num(self.decisive[name], nan=np.inf))
        return name, self.decisive[name]

    @property
    def agrees(self) -> bool:
        return self.worst[1] <= AGREES[self.dtype]


def errors(implementation: Any, size: Size, folder: Path | None = None) -> Errors:
    """Run `implementation` on the first tokens of `size`, and compare; `folder` caches the float64 results."""
    short = size.of_length(CHECKED)
    if folder is not None:
        implementation.poison()
    implementation.load(inputs(short), short.dtype)
    results = implementation.both() if folder is not None else (implementation.forward(), *implementation.backward())
    truth = _truth(short, folder)
    found = {name: _corner(implementation.numpy(x), name, short) for name, x in zip(NAMES, results, strict=True)}
    for name, x in found.items():
        if x.shape != truth[name].shape:
            raise ValueError(f"{name} has shape {x.shape} where the recurrence gives {truth[name].shape}")
    differences = {name: found[name].astype(np.float64) - truth[name] for name in NAMES}
    largest = {name: float(np.abs(x).max() / np.abs(truth[name]).max()) for name, x in differences.items()}
    norm = {name: float(np.linalg.norm(x) / np.linalg.norm(truth[name])) for name, x in differences.items()}
    return Errors(short.dtype, largest, norm)


def _truth(size: Size, folder: Path | None) -> dict[str, np.ndarray]:
    path = folder / f"{size}.npz".replace("/", "-").replace(" ", "_") if folder is not None else None
    if path is not None and path.exists():
        with np.load(path) as kept:
            return dict(kept)
    given = inputs(size)
    rows, tokens = given.times
    assert tokens == 1, "a check is short"

    def cornered(x: np.ndarray, name: str) -> np.ndarray:
        return _corner(np.concatenate([x] * rows), name, size)

    arrays = {name: cornered(x, name) for name, x in given.arrays.items()}
    dy = cornered(given.dy, "y")
    state = np.zeros((dy.shape[0], dy.shape[2], size.head_size, size.head_size))
    truth = _oracle().recurrence(arrays | {"initial_state": state}, dy, state)
    truth = {name: truth[name] for name in NAMES}
    if path is not None:
        np.savez(path, **truth)
    return truth


def _corner(x: np.ndarray, name: str, size: Size) -> np.ndarray:
    """The part of x [B, T, H, ...] in the first and last rows and key heads with their value heads; all where few."""
    rows = sorted({0, size.batch - 1})
    heads = np.arange(size.key_heads) if size.key_heads <= 4 else np.array([0, size.key_heads - 1])
    if name not in ("q", "k"):
        repeats = size.value_heads // size.key_heads
        heads = (heads[:, None] * repeats + np.arange(repeats)).reshape(-1)
    return x[rows][:, :, heads]


@cache
def _oracle() -> ModuleType:
    path = Path(__file__).parent.parent / "src/deltatune/ops/gated_delta/float64.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
