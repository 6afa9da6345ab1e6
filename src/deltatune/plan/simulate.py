"""Runs a graph in MLX's order without computing, and records when each buffer is allocated and freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ..machine import environment
from .graph import Node, all_nodes
from .primitives import VIEWS, run_primitive
from .storage import Buffer, StoredArray, dense, strided

# mlx/transforms.cpp: so many tasks are queued before MLX waits for one.
TASKS_AHEAD = 10


@dataclass(frozen=True)
class Pace:
    """How a device groups queued operations into tasks, and how it rounds buffers.

    A task ends after so many operations, or after these have read so many elements. Buffers above a page are rounded up
    to whole pages of so many bytes. `releases` counts the release of an operation's inputs as an operation, and
    `reads_once` a buffer that several operations of a task read once.
    """

    operations: int
    elements: int | None = None
    page: int = 1
    releases: bool = False
    reads_once: bool = False


def gpu_pace(piece: Mapping[str, int], *, reads_once: bool = False) -> Pace:
    """The pace of a GPU with pieces of work of these sizes, as in environment.PIECE."""
    elements = (piece[environment.ELEMENTS] + 1) << 20
    return Pace(piece[environment.OPERATIONS] + 1, elements, page=16384, reads_once=reads_once)


# Sources in mlx/backend: cpu/encoder.h; metal/device.cpp and metal/allocator.cpp; cuda/device.cpp. The variables that
# set the numbers of operations and elements are machine/environment.py's on CUDA, unless the user has set others.
PACES = {
    "cpu": Pace(10, releases=True),
    "metal": gpu_pace(environment.queued_on_metal(), reads_once=True),
    "cuda": gpu_pace(environment.queued()),
}


class Amount(NamedTuple):
    """Bytes and buffers, of one moment."""

    bytes: float
    buffers: float

    def plus(self, other: Amount, times: float = 1) -> Amount:
        """Add so many times another amount."""
        return Amount(self.bytes + times * other.bytes, self.buffers + times * other.buffers)


@dataclass(slots=True)
class Queue:
    """A stream's queue. MLX allocates when it queues, and a queued operation holds its inputs until it has run."""

    waiting: deque[Sequence[Buffer] | None] = field(default_factory=deque)
    operations: int = 0
    elements: int = 0
    tasks: int = 0
    read: set[Buffer] = field(default_factory=set)


class Simulation:
    """Follows buffers and arrays through one evaluation after another.

    The simulation assumes that MLX queues as far ahead as it may, so that queued operations hold their inputs as long
    as possible. Real runs come close to this, since operations take longer than queueing them. While more than `brake`
    bytes are alive, MLX waits for queued tasks. The first task has `queued` operations already.
    """

    def __init__(self, pace: Pace, brake: int | None = None, queued: int = 0):
        self._pace = pace
        self._brake = brake
        self.stored: dict[int, StoredArray] = {}
        self.live = self.live_bytes = 0
        # The most of them that lived at once.
        self.buffers = self.bytes = 0
        self.evaluated: list[Node] = []
        self.made: list[Buffer] = []
        self._holds: dict[int, int] = {}
        self._queue = Queue(operations=queued)
        self._temporaries: list[Buffer] = []
        # How many operations the release of inputs is.
        self._released = int(pace.releases)

    def add_leaves(self, leaves: Sequence[Node], shared_buffers: Sequence[Sequence[int]] = ()) -> None:
        """Add leaves, which stay alive until they are dropped.

        Leaves at the addresses of one group of `shared_buffers` share a buffer, which the largest of them fills.
        """
        by_address = {leaf.address: leaf for leaf in leaves}
        for group in shared_buffers:
            members = [by_address[address] for address in group if address in by_address and address not in self.stored]
            if members:
                shared = self.allocate(max(leaf.size * leaf.item_size for leaf in members), "given")
            for leaf in members:
                self._put(leaf, shared)
        for leaf in leaves:
            if leaf.address not in self.stored:
                self._put(leaf, self.allocate(leaf.size * leaf.item_size, "given"))

    def _put(self, leaf: Node, buffer: Buffer) -> None:
        made = strided(buffer, leaf.shape, leaf.strides, leaf.item_size) if leaf.strides and leaf.size else None
        buffer.references += 1
        self.stored[leaf.address] = made or dense(buffer, leaf.shape, leaf.item_size)
        self._holds[leaf.address] = 1

    def evaluate(self, order: Sequence[Node], outputs: Sequence[Node], dropped: Iterable[int] = ()) -> None:
        """Evaluate `outputs`, which stay alive, in an order; nothing but the graph refers to the `dropped` leaves."""
        holds = self._holds
        # Every output of a primitive holds its inputs.
        for source in chain(outputs, *(node.inputs for node in all_nodes(outputs))):
            holds[source.address] = holds.get(source.address, 0) + 1
        for address in dropped:
            if address in holds:
                holds[address] -= 1
                if not holds[address]:
                    self._forget(address)
        for node in order:
            self._evaluate(node)
        self._drain()

    def _evaluate(self, node: Node) -> None:
        stored = self.stored
        queue = self._queue
        self.evaluated.append(node)
        now = len(self.evaluated)
        inputs = [stored[source.address] for source in node.inputs]
        for one in inputs:
            one.buffer.reads.append(now)
        outputs = node.outputs() if node.siblings else [node]
        outputs_stored = run_primitive(self, node, inputs)
        for output, made in zip(outputs, outputs_stored, strict=True):
            made.buffer.references += 1
            stored[output.address] = made
        written = stored[node.address].buffer
        held = self._temporaries
        for one in inputs if len(outputs) == 1 else (*inputs, *outputs_stored):
            if one.buffer is not written and one.buffer not in held:
                held.append(one.buffer)
        if self._pace.elements is not None and node.kind not in VIEWS:
            for one in inputs:
                if not (self._pace.reads_once and one.buffer in queue.read):
                    queue.elements += one.data_size
                    queue.read.add(one.buffer)
        self._temporaries = []
        self._push(held, self._released)
        if queue.tasks > TASKS_AHEAD:
            self._run_one_task()
        while self._brake is not None and self.live_bytes > self._brake and queue.tasks:
            self._end_task()
            self._run_one_task()
        holds = self._holds
        for source in node.inputs if len(outputs) == 1 else node.inputs * len(outputs):
            holds[source.address] -= 1
            if not holds[source.address]:
                self._forget(source.address)
        for output in outputs:
            if not holds.get(output.address):
                self._forget(output.address)

    def allocate(self, size: int, kind: str) -> Buffer:
        """A new buffer of `size` bytes."""
        now = len(self.evaluated)
        page = self._pace.page
        if size > page:
            size = -(-size // page) * page
        buffer = Buffer(size, kind, now)
        self.made.append(buffer)
        self.live += 1
        self.live_bytes += size
        if self.live > self.buffers:
            self.buffers = self.live
        if self.live_bytes > self.bytes:
            self.bytes = self.live_bytes
        return buffer

    def is_donatable(self, node: Node) -> bool:
        """Whether nothing but the primitive that runs refers to this input or its buffer (array::is_donatable)."""
        return self._holds[node.address] == 1 and self.stored[node.address].buffer.references == 1

    def queue(self, times: int = 1) -> None:
        """Count operations that are sent to the stream."""
        for _ in range(times):
            self._push((), 1)

    def hold(self, temporary: Buffer) -> None:
        """Hold a temporary buffer until the queued operations have run."""
        self._temporaries.append(temporary)

    def _push(self, held: Sequence[Buffer], operations: int) -> None:
        queue, pace = self._queue, self._pace
        if held:
            for buffer in held:
                buffer.references += 1
            queue.waiting.append(held)
        queue.operations += operations
        if queue.operations >= pace.operations or (pace.elements is not None and queue.elements >= pace.elements):
            self._end_task()

    def _end_task(self) -> None:
        """End the task that operations are added to, unless it is empty."""
        queue = self._queue
        if queue.operations:
            queue.operations = queue.elements = 0
            queue.read.clear()
            queue.tasks += 1
            queue.waiting.append(None)

    def _run_one_task(self) -> None:
        while self._queue.waiting:
            held = self._queue.waiting.popleft()
            if held is None:
                self._queue.tasks -= 1
                return
            for buffer in held:
                self._release(buffer)

    def _drain(self) -> None:
        while self._queue.waiting:
            self._run_one_task()

    def _release(self, buffer: Buffer) -> None:
        buffer.references -= 1
        if buffer.references == 0:
            self.live -= 1
            self.live_bytes -= buffer.size
            buffer.died = len(self.evaluated)

    def _forget(self, address: int) -> None:
        self._holds.pop(address, None)
        stored = self.stored.pop(address, None)
        if stored is not None:
            self._release(stored.buffer)
