"""Reads the graph behind lazy arrays, and derives the order in which MLX will evaluate it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .array_layout import ArrayLayout


@dataclass(slots=True, eq=False)
class Node:
    """One array: a leaf, which exists already and has an empty `kind`, or an output of a primitive of that `kind`.

    `strides` are set for leaves. `siblings` are the primitive's other outputs, and `position` is this one's index
    among all of them. `size` counts elements. `arguments` are those of ArrayLayout.arguments().
    """

    address: int
    shape: tuple[int, ...]
    item_size: int
    kind: str = ""
    arguments: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    inputs: list[Node] = field(default_factory=list)
    siblings: list[Node] = field(default_factory=list)
    position: int = 0
    size: int = 1

    def outputs(self) -> list[Node]:
        """All outputs of the primitive, in order."""
        if not self.siblings:
            return [self]
        return sorted([self, *self.siblings], key=lambda node: node.position)


def read(layout: ArrayLayout, outputs: Sequence[mx.array], leaves: Collection[int]) -> list[Node]:
    """The nodes of `outputs`, linked to everything that they are computed from.

    Arrays at the addresses of `leaves` count as values, although they may have a primitive.
    """
    layout = layout.of_unchanged()
    nodes: dict[int, Node] = {}
    starts = [layout.address(array) for array in outputs]
    stack = list(starts)
    links: list[tuple[Node, tuple[int, ...], tuple[int, ...]]] = []
    while stack:
        at = stack.pop()
        if at in nodes:
            continue
        seen = layout.describe(at)
        size = math.prod(seen.shape)
        node = nodes[at] = Node(at, seen.shape, seen.item_size, strides=seen.strides, position=seen.position, size=size)
        if at in leaves or not seen.primitive:
            continue
        node.kind = layout.kind(seen.primitive)
        node.arguments = layout.arguments(seen.primitive, node.kind)
        links.append((node, seen.inputs, seen.siblings))
        stack += seen.inputs
        stack += seen.siblings
    for node, inputs, siblings in links:
        node.inputs = [nodes[at] for at in inputs]
        node.siblings = [nodes[at] for at in siblings]
    return [nodes[at] for at in starts]


def evaluation_order(outputs: Sequence[Node], width: int) -> list[Node]:
    """One output of every primitive, in the order in which MLX evaluates them.

    MLX puts a primitive on a tape after its last consumer, breadth first, and depth first where more than `width`
    are waiting. It then runs the tape backwards.

    Source: eval_impl in mlx/transforms.cpp.
    """
    root = Node(0, (), 1, "Synchronizer", inputs=list(outputs))
    degree = _degrees(root)
    tape = [root]
    stack: list[tuple[Node, int]] = []
    index = 0
    while degree and (index < len(tape) or stack):
        start = 0
        if index >= len(tape):
            node, start = stack.pop()
        else:
            node = tape[index]
            index += 1
        for at in range(start, len(node.inputs)):
            source = node.inputs[at]
            if not source.kind:
                continue
            if len(tape) - index >= width:
                stack.append((node, at))
                break
            degree[source] -= 1
            if degree[source]:
                for sibling in source.siblings:
                    degree[sibling] -= 1
                continue
            del degree[source]
            for sibling in source.siblings:
                degree.pop(sibling, None)
            tape.append(source)
    return tape[:0:-1]


def _degrees(root: Node) -> dict[Node, int]:
    """How often each array is used as an input; the outputs of one primitive share their count."""
    degree: dict[Node, int] = {}
    queue = deque([root])
    while queue:
        for source in queue.pop().inputs:
            if source in degree:
                degree[source] += 1
            else:
                degree[source] = 1
                queue.append(source)
                for sibling in source.siblings:
                    degree[sibling] = 1
                continue
            for sibling in source.siblings:
                degree[sibling] += 1
    return degree


def all_nodes(outputs: Sequence[Node]) -> list[Node]:
    """Every array of the graph once, leaves and siblings included."""
    nodes: dict[Node, None] = {}
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes[node] = None
            stack += node.inputs
            stack += node.siblings
    return list(nodes)
