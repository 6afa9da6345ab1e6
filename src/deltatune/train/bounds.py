"""The decisions that a plan makes about a run, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ops.recomputation import Checkpoints
from .by_layer.store import Store
from .reports.screen import Fact


@dataclass(frozen=True)
class Bounds:
    """The decisions of a plan, with which a run stays within the memory of the device, or within `config.memory`.

    Attributes:
        said: Lines for the user: the plan, or why there is none on this version of MLX.
        checkpoints: The layers to recompute where `config.grad_checkpoint` is auto; None elsewhere.
        memory_limit: The bytes from which on MLX waits for queued work; None for its own limit.
        feature_bytes: The main memory that cached features of images may take; None for none where layers stay on the
            disk, and for 1 GiB elsewhere.
        weights: The store of the layers' weights; None where all of them stay in memory.
    """

    said: Sequence[Fact | str] = ()
    checkpoints: Checkpoints | None = None
    memory_limit: int | None = None
    feature_bytes: int | None = None
    weights: Store | None = None
