"""Chooses which frozen layers stay in memory where `memory` bounds a run, and says what reading the others costs.

A step by layers holds what a checkpointed step holds, but for the frozen weights of layers on the disk: of these, two
are in memory at a time, one in use and one that is being read.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..layers import describe
from ..machine import disk_rate
from ..models.checkpoint_files import WEIGHTS
from ..train.by_layer.layer_functions import array_places, lowest_layer
from ..train.by_layer.layer_weights import LayerWeights
from ..train.by_layer.stored_weights import StoredWeights
from ..train.reports.screen import Fact
from ..train.setup import Run
from .array_layout import ArrayLayout
from .fit import shape
from .forecast import Forecast, forecast_step
from .layers_on_disk import held, left_on_disk
from .process_memory import LayoutError
from .screen import size


@dataclass(frozen=True)
class Placement:
    """Where the frozen weights of a run's layers are.

    Args:
        memory: what the run may hold, in bytes.
        plan: the step with all weights in memory and all layers checkpointed.
        layers: the bytes of each layer's frozen weights.
        lowest: the first layer that the backward pass reaches.
        streamed: the positions of the layers that stay on the disk, ascending.
        folder: the folder of the checkpoint.
    """

    memory: int
    plan: Forecast
    layers: tuple[int, ...]
    lowest: int
    streamed: tuple[int, ...]
    folder: Path

    @property
    def bytes(self) -> int:
        """What the run holds at its peak."""
        return held(self.plan.bytes.amount, self.layers, self.streamed)

    @property
    def read(self) -> int:
        """The bytes that a micro-batch reads.

        The layer at which the passes turn round is read once, and one at which the backward pass ends is there when the
        next forward pass begins with it.
        """
        if len(self.streamed) < 2:
            return 0
        backward = [at for at in self.streamed if at >= self.lowest]
        both = sum(self.layers[at] for at in [*self.streamed, *backward])
        once = {self.streamed[-1], self.streamed[0]} if backward == list(self.streamed) else set(backward[-1:])
        return both - sum(self.layers[at] for at in once)

    def said(self) -> list[Fact | str]:
        """Return what to tell the user; this reads from the disk for a second."""
        rows = f"{self.plan.rows} x {self.plan.length:,} tokens"
        if not self.streamed:
            text = f"{size(self.bytes)} planned of {size(self.memory)} (--memory); {rows}; all weights stay in memory"
            return [Fact("memory", text)]
        on_disk = sum(self.layers[at] for at in self.streamed)
        file = max(self.folder.glob(WEIGHTS), key=lambda file: file.stat().st_size)
        rate = disk_rate.measured(file)
        memory = (
            f"{size(self.bytes)} planned of {size(self.memory)} (--memory); {rows}; {len(self.streamed)} of "
            f"{len(self.layers)} layers, {size(on_disk)}, stay on the disk"
        )
        disk = (
            f"{size(self.read)} read in each iteration, {self.read / rate:.1f} s at the {size(int(rate))} a second "
            f"measured now; an iteration that computes for longer does not wait"
        )
        return [Fact("memory", memory), Fact("disk", disk)]


class TooLittleMemoryError(UserError):
    """`memory` is less than a run takes with all of its layers but two on the disk."""


class Placed(NamedTuple):
    """A run whose weights have been placed.

    Attributes:
        placement: Where they are.
        lines: What the run's preparation says.
        stored: Which arrays lie in files.
    """

    placement: Placement
    lines: list[str]
    stored: StoredWeights

    def weights(self, run: Run, stack: ExitStack) -> LayerWeights | None:
        """Read what stays in memory; return where the layers' weights are read from, or None if all stay.

        The files are closed with `stack`.
        """
        layers = [layer.module for layer in describe(run.model)]
        weights = LayerWeights(self.stored, run.model, layers, self.placement.streamed)
        stack.callback(weights.close)
        if self.placement.streamed:
            return weights
        run.config = dataclasses.replace(run.config, memory=None)
        return None


def placed(run: Run) -> Placed:
    """Prepare a run that was loaded lazily, and choose which of its layers stay on the disk. Nothing is read.

    Args:
        run: the run; its options are changed to what `memory` implies.

    Raises:
        UserError: the run cannot be computed by layers, or `memory` is too small for it.
    """
    config, model = run.config, run.model
    memory = config.memory
    assert memory is not None
    if run.image is not None:
        raise UserError(f"memory: {run.image}: images do not train with weights on the disk yet; leave memory out.")
    if run.world.size > 1:
        raise UserError("memory: weights stay on the disk of one process alone, so far; start a single one.")
    stored = StoredWeights(run.loaded.path, model, trust_remote_code=config.trust_remote_code)
    run.config = config = dataclasses.replace(config, grad_checkpoint=True)
    lines = run.prepare()
    stored.find(model)
    layers = describe(model)
    sizes = tuple(
        sum(place.array.nbytes for path, place in array_places(layer.module, f"{layer.path}.") if path in stored.names)
        for layer in layers
    )
    try:
        plan = forecast_step(model, config, *shape(run), ArrayLayout.measured())
    except LayoutError as error:
        raise UserError(f"memory: this version of MLX cannot be planned for ({error}); leave memory out.") from error
    streamed = left_on_disk(plan.bytes.amount, sizes, memory)
    if streamed is None:
        least = held(plan.bytes.amount, sizes, tuple(range(len(sizes))))
        raise TooLittleMemoryError(
            f"memory: {size(memory)} is too little. With all layers on the disk but two, {plan.rows} x "
            f"{plan.length:,} tokens take {size(least)}; give more, or a smaller --batch-size or --max-seq-length."
        )
    lowest = lowest_layer(model, [layer.path for layer in layers])
    placement = Placement(memory, plan, sizes, lowest, streamed, run.loaded.path)
    return Placed(placement, lines, stored)
