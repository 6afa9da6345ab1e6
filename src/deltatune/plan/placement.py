"""Chooses which frozen layers stay in memory where `memory` bounds a run, and reports the time of reading the others.

A step by layers holds as much as a checkpointed step, except for the frozen weights of layers on the disk: two of these
layers are in memory at a time, one in use and one that is prefetched.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..layers import describe
from ..machine import backend, host_memory
from ..machine.disk import disk_rate
from ..models.checkpoint_files import weight_files
from ..models.vision.split import CACHE_BYTES, frozen_tower
from ..ops.functional import is_floating
from ..options.config import TrainConfig
from ..train.by_layer.layer_functions import lowest_layer
from ..train.by_layer.layer_inputs import INPUTS, DiskTime, InputsOnDisk, InputsOnHost, LayerInputs
from ..train.by_layer.store import Store, cached
from ..train.loop import Bounds
from ..train.reports.screen import Fact
from ..train.setup import Run
from ..train.tree import array_places, leaves, nbytes
from .advice import advice
from .array_layout import ArrayLayout, LayoutError
from .device_limits import Brake, brake, device_limits
from .fit import Planner, shape
from .forecast import Forecast, Products, speed
from .screen import size, size_above
from .search import held, left_on_disk


@dataclass(frozen=True)
class Placement:
    """Where the frozen weights of a model's layers are, which have so many bytes each.

    A pass over rows and tokens of a row has its `peak` with all weights in memory, and `memory` is the limit. The
    `streamed` layers stay on the disk, or in the host's memory beside a GPU; a backward pass reaches the layers from
    the `lowest` on. So many bytes of layers' `inputs` leave the memory between the passes. `features` is the limit of
    cached features of a frozen vision tower, in `memory` or in the host's. `model` are words behind "layers".
    """

    memory: int
    peak: int
    tokens: tuple[int, int]
    layers: tuple[int, ...]
    lowest: int
    streamed: tuple[int, ...]
    folder: Path
    products: Products | None = None
    dtype: mx.Dtype = mx.float32
    on_host: bool = False
    inputs: int = 0
    inputs_on_host: bool = False
    features: int = 0
    stored: Store | None = None
    model: str = ""

    @property
    def on_disk(self) -> int:
        """The bytes of the layers that stay on the disk, or on the host."""
        return sum(self.layers[at] for at in self.streamed)

    @property
    def bytes(self) -> int:
        """The peak, in bytes."""
        return held(self.peak, self.layers, self.streamed)

    @property
    def read(self) -> int:
        """The bytes that a micro-batch reads, or a forward pass.

        The layer at which the passes turn round is read once, and one at which the backward pass ends is there when the
        next forward pass begins with it.
        """
        if len(self.streamed) < 2:
            return 0
        backward = [at for at in self.streamed if at >= self.lowest]
        both = sum(self.layers[at] for at in [*self.streamed, *backward])
        once = {self.streamed[-1], self.streamed[0]} if backward == list(self.streamed) else set(backward[-1:])
        return both - sum(self.layers[at] for at in once)

    @property
    def shape(self) -> str:
        """The shape of a pass, in words."""
        rows, length = self.tokens
        return f"{rows} x {length:,} tokens"

    def bounds(self, run: Run) -> Bounds:
        """Read the weights that stay in memory; return the lines to print, the store of the others, and limits."""
        if run.teacher is not None:
            mx.eval(run.model.parameters())
            teacher = self.of(run.teacher)
            limit = self.limit() + (0 if teacher is None else teacher.on_host)
            return Bounds(self.said(), memory_limit=limit, teacher=teacher)
        weights = self.of(run.model, Path(run.config.adapter_path) / f"{INPUTS}_{run.world.rank}")
        return Bounds(self.said(), None, self._brake(), self.features, weights)

    def limit(self) -> int:
        """Return the bytes from which on MLX waits for queued work while the model answers or is evaluated."""
        return self._brake() or self.memory

    def _brake(self) -> int | None:
        return None if self.streamed else brake(self.memory)

    def of(self, model: nn.Module, folder: Path | None = None) -> Store | None:
        """Read the weights that stay in memory; return the store of the others, or None if all stay.

        `folder` is that of layers' inputs, where they go to the disk.
        """
        assert self.stored is not None
        layers = [layer.module for layer in describe(model)]
        disk = DiskTime(of="the host's memory" if self.on_host else "the disk")
        inputs: LayerInputs | None = None
        if self.inputs_on_host:
            inputs = InputsOnHost(disk)
        elif self.inputs and folder is not None:
            disk.of = "the host's memory and the disk" if self.on_host else disk.of
            inputs = InputsOnDisk(folder, disk)
        self.stored.place(model, layers, self.streamed, on_host=self.on_host, disk=disk, inputs=inputs)
        if self.streamed:
            return self.stored
        self.stored.close()
        return None

    def said(self, unit: str = "iteration") -> list[Fact | str]:
        """Return the lines to print; this reads from the disk for a second. Every `unit` is a pass."""
        where = "the host's memory" if backend.has_own_memory() else "the rest"
        features = f"; features of images take up to {size(self.features)} of {where}" if self.features else ""
        if not self.streamed:
            text = f"{size(self.bytes)} planned of {size(self.memory)} (--memory); {self.shape}"
            return [Fact("memory", f"{text}; all weights stay in memory{features}")]
        memory = (
            f"{size(self.bytes)} planned of {size(self.memory)} (--memory); {self.shape}; {len(self.streamed)} of "
            f"{len(self.layers)} layers{self.model}, {size(self.on_disk)}, stay "
        )
        inputs = f"; layer inputs, {size(self.inputs)}, go to " if self.inputs else ""
        if inputs:
            inputs += "the host's memory" if self.inputs_on_host else "the disk"
            inputs += " as well" if self.inputs_on_host == self.on_host else ""
        if self.on_host:
            text = f"{memory}in the host's memory, from which the GPU copies {size(self.read)} for each {unit}{inputs}"
            return [Fact("memory", f"{text}{features}")]
        file = max(weight_files(self.folder), key=lambda file: file.stat().st_size)
        rate = disk_rate(file)
        speed = f"at the {size(int(rate))} a second measured now"
        if cached(self.folder):
            disk = (
                f"{size(self.read)} read for each {unit}; the checkpoint fits in half of the free memory and stays in "
                f"the system's page cache, so that the disk gives it once, in {self.on_disk / rate:.1f} s {speed}"
            )
        else:
            # Layers' inputs are written and read again.
            seconds = (self.read + 2 * self.inputs) / rate
            written = f" and {size(self.inputs)} written" if self.inputs else ""
            read = f"{size(self.read + self.inputs)} read{written} for each {unit}"
            disk = f"{read}, {seconds:.1f} s {speed}; {self._hidden(seconds, unit)}"
        return [Fact("memory", f"{memory}on the disk{inputs}{features}"), Fact("disk", disk)]

    def _hidden(self, seconds: float, unit: str) -> str:
        """Say when a pass does not wait for the disk, from which it reads for so many seconds."""
        words = f"{unit}s that compute for longer do not wait"
        if self.products is None or self.products.largest is None:
            return words
        computing = self.products.operations / speed(self.products.largest, self.dtype)
        tokens = self.tokens[0] * self.tokens[1] * seconds / computing
        return (
            f"its matrix products take about {computing:.1f} s, so that the disk is hidden from about "
            f"{_rounded(tokens):,} tokens an {unit} on"
        )


def _rounded(count: float) -> int:
    """Return a count with two digits, rounded up."""
    step = 10 ** max(len(str(int(count))) - 2, 0)
    return math.ceil(count / step) * step


class TooLittleMemoryError(UserError):
    """`memory` is less than a run takes with all of its layers but two on the disk; `lacking` are the bytes over it."""

    lacking = 0


def placed(run: Run) -> tuple[Placement, list[str]]:
    """Prepare a run that was loaded lazily, and choose which of its layers stay on the disk. Nothing is read.

    The lines to print come from the preparation. UserError where the run cannot be computed by layers, or `memory` is
    too small for it.
    """
    config, model = run.config, run.model
    memory = config.memory
    assert memory is not None
    stored = Store(run.loaded.path, model, trust_remote_code=config.trust_remote_code)
    lines = run.prepare()
    stored.find(model)
    rows, length = shape(run)
    with refusing_layouts():
        planner = Planner(run, ArrayLayout.measured())
        fits = False
        # A model that stays in memory as a whole is not computed by layers, and holds more at a time.
        if nbytes(model.parameters()) <= memory:
            limit = brake(memory)
            waits = None if limit is None else Brake(limit, limit)
            plan = dataclasses.replace(planner, brake=waits).at(rows, length)
            fits = plan.bytes.amount <= memory
        if not fits:
            plan = planner.at(rows, length, layer_inputs="memory")
        smaller = "a smaller --batch-size or --max-seq-length"
        planned = PlannedPass(plan.bytes.amount, (rows, length), smaller, whole=fits)
        inputs = 0
        try:
            placement = chosen(model, stored, memory, planned, run.world.size)
        except TooLittleMemoryError:
            plan = planner.at(rows, length, layer_inputs="disk")
            planned = planned._replace(peak=plan.bytes.amount)
            inputs = plan.layer_inputs
            try:
                placement = chosen(model, stored, memory, planned, run.world.size)
            except TooLittleMemoryError as error:
                raise _with_advice(error, planner, plan) from None
            both = (placement.on_disk + inputs) * run.world.size
            placement = dataclasses.replace(placement, inputs_on_host=placement.on_host and fits_on_host(both))
    placement = dataclasses.replace(
        placement,
        products=plan.products,
        dtype=_most_used_dtype(model),
        inputs=inputs,
        features=_feature_bytes(model, memory - placement.bytes),
    )
    return placement, lines


def _feature_bytes(model: nn.Module, spare: int) -> int:
    """Return the limit of cached features: so many bytes that a plan leaves, or the host's share beside a GPU."""
    if frozen_tower(model) is None:
        return 0
    return CACHE_BYTES if backend.has_own_memory() else min(spare, CACHE_BYTES)


def _with_advice(error: TooLittleMemoryError, planner: Planner, plan: Forecast) -> TooLittleMemoryError:
    """The refusal with a sentence on smaller adapters and moments; `plan` is that of layers' inputs on the disk."""

    def planned(model: nn.Module, config: TrainConfig) -> int:
        return planner.at(plan.rows, plan.length, config=config, model=model, layer_inputs="disk").bytes.amount

    said = advice(planner.run, plan.bytes.amount, error.lacking, planned)
    return TooLittleMemoryError(f"{error} {said}" if said else str(error))


def _most_used_dtype(model: nn.Module) -> mx.Dtype:
    """Return the dtype of most floating-point numbers of a model; those of quantised weights are scales."""
    numbers: Counter[mx.Dtype] = Counter()
    for _, array in leaves(model.parameters()):
        if is_floating(array):
            numbers[array.dtype] += array.size
    return max(numbers, key=lambda dtype: numbers[dtype])


@contextmanager
def refusing_layouts() -> Iterator[None]:
    """Say for the user that the loaded MLX cannot be planned for."""
    try:
        yield
    except LayoutError as error:
        raise UserError(f"memory: this version of MLX cannot be planned for ({error}); leave memory out.") from error


class PlannedPass(NamedTuple):
    """The plan of one pass: the peak with all weights in memory, in bytes, of rows of so many tokens.

    `smaller` is a change that would take less memory, in words. If all layers are computed as a `whole`, all may stay
    in memory.
    """

    peak: int
    tokens: tuple[int, int]
    smaller: str
    whole: bool = True


def chosen(model: nn.Module, stored: Store, memory: int, planned: PlannedPass, ranks: int = 1) -> Placement:
    """Choose which layers stay on the disk within `memory` bytes, where so many ranks hold weights on one host.

    TooLittleMemoryError where it is too little with all layers but two on the disk, UserError where it is more than the
    device has.
    """
    layers = describe(model)
    sizes = tuple(
        sum(place.array.nbytes for path, place in array_places(layer.module, f"{layer.path}.") if path in stored.names)
        for layer in layers
    )
    streamed = left_on_disk(planned.peak, sizes, memory, least=int(not planned.whole))
    lowest = lowest_layer(model, [layer.path for layer in layers])
    shape = planned.peak, planned.tokens, sizes, lowest, streamed or ()
    placement = Placement(memory, *shape, stored.path, stored=stored)
    if streamed is None:
        least = held(planned.peak, sizes, tuple(range(len(sizes))))
        error = TooLittleMemoryError(
            f"memory: {size(memory)} is too little. With all layers on the disk but two, {placement.shape} take "
            f"{size_above(least)}; give that or more, or {planned.smaller}."
        )
        error.lacking = least - memory
        raise error
    limits = device_limits()
    if limits.bytes is not None and placement.bytes > limits.bytes:
        raise UserError(
            f"memory: {size(memory)} is more than the {size(limits.bytes)} that arrays may take here "
            f"({limits.why_bytes}), and {size(placement.bytes)} of it are planned; give --memory less."
        )
    return dataclasses.replace(placement, on_host=bool(streamed) and fits_on_host(placement.on_disk * ranks))


def fits_on_host(size: int) -> bool:
    """Whether so many bytes take at most half of the free memory beside an NVIDIA GPU."""
    free = host_memory.free() if backend.has_own_memory() else None
    return free is not None and size <= free // 2
