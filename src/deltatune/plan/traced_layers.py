"""Traces a step by layers: what it computes one after another, and how long each result stays alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..train.by_layer.layer_functions import array_places
from ..train.by_layer.layer_passes import LayerPasses
from ..train.setup import Training
from ..train.tree import leaves
from .array_layout import ArrayLayout
from .graph import Node, all_nodes, read


class _AsLoaded:
    """Hands out the arrays that layers hold, of which none is read.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self._layers = layers

    def along(self, order: Sequence[int]) -> Iterator[list[mx.array]]:
        """Yield the arrays of the layers in `order`."""
        for index in order:
            yield [place.array for _, place in array_places(self._layers[index])]


@contextmanager
def noted_passes(
    model: nn.Module, trained: Training, *, by_layers: bool
) -> Iterator[tuple[LayerPasses | None, list[list[mx.array]]]]:
    """Yield the passes of a step by layers that compute nothing, and the list in which they note what they would.

    A step as a whole has no passes, and notes nothing.

    Args:
        model: The model, set up by setup.training() with every layer checkpointed.
        trained: What that yields.
        by_layers: Whether the step is one by layers.
    """
    noted: list[list[mx.array]] = []
    if not by_layers:
        yield None, noted
        return

    def note(*results: Any) -> None:
        noted.append([array for _, array in leaves(results) if isinstance(array, mx.array)])

    layers = [layer.module for layer in trained.layers]
    passes = LayerPasses(model, layers, trained.loss, _AsLoaded(layers), note)
    with passes.served():
        yield passes, noted


def parts_read(
    layout: ArrayLayout, noted: Sequence[Sequence[mx.array]], existing: set[int]
) -> tuple[list[list[Node]], list[list[int]]]:
    """Read the graphs of evaluations that follow each other.

    Args:
        layout: How the loaded MLX stores its arrays.
        noted: The results of each evaluation.
        existing: Addresses of what exists before the first of them.

    Returns:
        The outputs of each evaluation, which are its results and what a later one reads of its graph; and for each
        the addresses of what earlier ones made, and neither it nor a later one reads.
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
