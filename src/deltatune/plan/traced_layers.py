"""Traces a step by layers: the sequence of its evaluations, and how long each result stays alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..train.by_layer.layer_inputs import LayerInputs
from ..train.by_layer.layer_passes import LayerPasses
from ..train.by_layer.store import ResidentLayers
from ..train.setup import Training
from ..train.tree import leaves
from .array_layout import ArrayLayout
from .graph import Node, all_nodes, read

#: The place of layers' inputs in a step by layers: in memory, or on the disk (or in the host's memory beside a GPU).
InputsPlace = Literal["memory", "disk"]


class NotedInputs(LayerInputs):
    """Stands in for InputsOnDisk and InputsOnHost in a plan: notes their reads, and writes nothing.

    Inputs that do not leave the memory are only counted; `bytes` are those of inputs kept between the passes.
    """

    def __init__(self, note: Callable[..., None], *, on_disk: bool):
        self._note = note
        self._on_disk = on_disk
        self.bytes = 0
        self._kept: list[Callable[[], mx.array]] = []
        self._ahead: mx.array | None = None

    def clear(self) -> None:
        """Drop the kept inputs."""
        self._kept = []
        self._ahead = None
        self.bytes = 0

    def keep(self, x: mx.array, computing: Any) -> None:
        """Count an array."""
        self.bytes += x.nbytes
        self._kept.append(partial(self._read, x.shape, x.dtype) if self._on_disk else lambda: x)

    def take(self) -> mx.array:
        """Return the array that was kept last, or one like it; note the reading of the one before."""
        array = self._kept.pop()() if self._ahead is None else self._ahead
        self._ahead = self._kept.pop()() if self._kept else None
        return array

    def _read(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        array = mx.zeros(shape, dtype)
        self._note(array)
        return array


class NotedPasses(NamedTuple):
    """The passes of a step by layers, None for a step as a whole, and the results of each evaluation, not computed."""

    passes: LayerPasses | None
    noted: list[list[mx.array]]
    inputs: NotedInputs


@contextmanager
def noted_passes(model: nn.Module, trained: Training, layer_inputs: InputsPlace | None) -> Iterator[NotedPasses]:
    """Yield the passes of a step by layers, which note their evaluations. A step as a whole notes nothing.

    setup.training() has set the model up, with every layer checkpointed if the step is one by layers.
    """
    noted: list[list[mx.array]] = []
    note = _noting(noted)
    inputs = NotedInputs(note, on_disk=layer_inputs == "disk")
    if layer_inputs is None:
        yield NotedPasses(None, noted, inputs)
        return
    layers = [layer.module for layer in trained.layers]
    passes = LayerPasses(model, trained.loss, ResidentLayers(layers, inputs), note)
    with passes.served():
        yield NotedPasses(passes, noted, inputs)


@contextmanager
def noted_calls(layers: Sequence[nn.Module]) -> Iterator[list[list[mx.array]]]:
    """Within the context, layers called one after another note their evaluations in the yielded list."""
    noted: list[list[mx.array]] = []
    with ResidentLayers(layers).calls(_noting(noted)).watched():
        yield noted


@contextmanager
def nothing_started() -> Iterator[None]:
    """Within the context, mx.async_eval does nothing.

    A forward pass of mlx-vlm starts to compute its recurrences, for which it would read the weights that are planned.
    """
    original = mx.async_eval
    mx.async_eval = lambda *_: None
    try:
        yield
    finally:
        mx.async_eval = original


def _noting(noted: list[list[mx.array]]) -> Callable[..., None]:
    """Return a function that notes arrays in the place of computing them."""

    def note(*results: Any) -> None:
        noted.append([array for _, array in leaves(results) if isinstance(array, mx.array)])

    return note


def parts_read(
    layout: ArrayLayout, noted: Sequence[Sequence[mx.array]], existing: set[int]
) -> tuple[list[list[Node]], list[list[int]]]:
    """Read the graphs of evaluations that follow each other, from arrays at `existing` addresses on.

    Return the outputs of each evaluation, which are its results and the nodes of its graph that later ones read; and
    for each the addresses of earlier ones' nodes that neither it nor a later one reads.
    """
    graphs: list[list[Node]] = []
    made_by: dict[int, tuple[int, Node]] = {}
    last_use: dict[int, int] = {}
    seen = set(existing)
    for at, results in enumerate(noted):
        # A result that was there before is read, not made.
        outputs = read(layout, results, seen)
        graphs.append(list({node.address: node for node in outputs if node.kind}.values()))
        for node in all_nodes(outputs):
            if node.kind:
                made_by[node.address] = at, node
                seen.add(node.address)
            elif node.address in made_by:
                last_use[node.address] = at
    for address in last_use:
        maker, node = made_by[address]
        if node not in graphs[maker]:
            graphs[maker].append(node)
    dropped: list[list[int]] = [[] for _ in graphs]
    last_results = {layout.address(array) for array in noted[-1]}
    for graph in graphs[:-1]:
        for node in graph:
            if node.address in last_results:
                continue
            after = last_use.get(node.address, made_by[node.address][0]) + 1
            dropped[min(after, len(graphs) - 1)].append(node.address)
    return graphs, dropped
