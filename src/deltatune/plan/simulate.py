"""Runs a graph in MLX's order without computing: every buffer's birth and death, and the most that live at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..machine import environment
from .array_layout import ArrayLayout
from .graph import Node, all_nodes
from .primitives import run
from .storage import Buffer, StoredArray, dense, strided
from .views import VIEWS

# mlx/transforms.cpp: tasks that are queued before MLX waits for one.
TASKS_AHEAD = 10


@dataclass(frozen=True)
class Pace:
    """What makes a task of what is queued: so many operations, or so many elements read; and the size of a page, to
    which larger buffers are rounded. `releases`: letting go of an operation's inputs is an operation too.
    """

    operations: int
    elements: int | None = None
    page: int = 1
    releases: bool = False


# mlx/backend/cpu/encoder.h; metal/device.cpp, of the largest chips, and metal/allocator.cpp; cuda/device.cpp, with
# what environment.py asks of it.
PACES = {
    "cpu": Pace(10, releases=True),
    "metal": Pace(51, 51 << 20, page=16384),
    "cuda": Pace(101, (environment.QUEUED + 1) << 20, page=16384),
}


@dataclass
class Peak:
    """The most that lived at once, and when: `at` counts evaluated primitives from the start of the run."""

    amount: int = 0
    at: int = 0


@dataclass
class Record:
    """One buffer of the run: what made it, when, and when its last holder let go (None: it lives on)."""

    buffer: Buffer
    died: int | None = None


@dataclass
class Queue:
    """A stream's queue. MLX allocates when it queues; what is queued holds its inputs until it has run."""

    waiting: deque[list[Buffer] | None] = field(default_factory=deque)
    operations: int = 0
    elements: int = 0
    tasks: int = 0


class Simulation:
    """Buffers and arrays through one evaluation after another.

    MLX queues as far ahead as it may, so that what is queued holds its inputs as long as it can: so it is where
    operations take longer than queueing them, as real ones do. pace: how the device makes tasks of operations.
    """

    def __init__(self, layout: ArrayLayout, pace: Pace):
        self.layout, self._pace = layout, pace
        self.stored: dict[int, StoredArray] = {}
        self.live = self.live_bytes = 0
        self.buffers, self.bytes = Peak(), Peak()
        self.evaluated: list[Node] = []
        self.records: dict[Buffer, Record] = {}
        self._holds: dict[int, int] = {}
        self._queue = Queue()
        self._temporaries: list[Buffer] = []

    def place(self, leaves: Sequence[Node], together: Sequence[Sequence[int]] = ()) -> None:
        """Let leaves be there, as long as they are not dropped.

        together: addresses of leaves that are parts of one buffer, which one of them is as a whole.
        """
        found = {leaf.address: leaf for leaf in leaves}
        for group in together:
            members = [found[address] for address in group if address in found and address not in self.stored]
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
        """Run the graph of `outputs` in `order`; they stay. `dropped`: leaves that only the graph refers to."""
        for node in all_nodes(outputs):
            # Every output of a primitive holds its inputs.
            for given in node.inputs:
                self._holds[given.address] = self._holds.get(given.address, 0) + 1
        for node in outputs:
            self._holds[node.address] = self._holds.get(node.address, 0) + 1
        for address in dropped:
            if address in self._holds:
                self._release_array(address)
        for node in order:
            self._evaluate(node)
        self._drain()

    def _evaluate(self, node: Node) -> None:
        self.evaluated.append(node)
        given = [self.stored[each.address] for each in node.inputs]
        outputs = node.outputs()
        found = run(self, node, given)
        for output, stored in zip(outputs, found, strict=True):
            stored.buffer.references += 1
            self.stored[output.address] = stored
        own = self.stored[node.address].buffer
        held = {id(one.buffer): one.buffer for one in (*given, *found) if one.buffer is not own}
        if len(outputs) == 1:
            held = {id(one.buffer): one.buffer for one in given if one.buffer is not own}
        if node.kind not in VIEWS:
            self._queue.elements += sum(one.data_size for one in given)
        self._push([*held.values(), *self._temporaries], int(self._pace.releases))
        self._temporaries = []
        if self._queue.tasks > TASKS_AHEAD:
            self._run_one_task()
        for each in node.inputs * len(outputs):
            self._release_array(each.address)
        for output in outputs:
            if not self._holds.get(output.address):
                self._forget(output.address)

    def allocate(self, size: int, kind: str) -> Buffer:
        """A new buffer of `size` bytes."""
        now, page = len(self.evaluated), self._pace.page
        if size > page:
            size = -(-size // page) * page
        buffer = Buffer(size, kind, now)
        self.records[buffer] = Record(buffer)
        self.live += 1
        self.live_bytes += size
        if self.live > self.buffers.amount:
            self.buffers = Peak(self.live, now)
        if self.live_bytes > self.bytes.amount:
            self.bytes = Peak(self.live_bytes, now)
        return buffer

    def sole(self, node: Node) -> bool:
        """Whether nothing but the primitive that runs refers to this input or its buffer (array::is_donatable)."""
        return self._holds[node.address] == 1 and self.stored[node.address].buffer.references == 1

    def queue(self, times: int = 1) -> None:
        """Count an operation that is sent to the stream."""
        for _ in range(times):
            self._push([], 1)

    def keep(self, temporary: Buffer) -> None:
        """Hold a temporary buffer until what was queued has run."""
        self._temporaries.append(temporary)

    def _push(self, held: list[Buffer], operations: int) -> None:
        for buffer in held:
            buffer.references += 1
        queue, pace = self._queue, self._pace
        queue.waiting.append(held)
        queue.operations += operations
        if queue.operations >= pace.operations or (pace.elements is not None and queue.elements >= pace.elements):
            queue.operations = queue.elements = 0
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
            self.records[buffer].died = len(self.evaluated)

    def _release_array(self, address: int) -> None:
        self._holds[address] -= 1
        if self._holds[address] == 0:
            self._forget(address)

    def _forget(self, address: int) -> None:
        self._holds.pop(address, None)
        stored = self.stored.pop(address, None)
        if stored is not None:
            self._release(stored.buffer)

    def alive(self, at: int) -> list[Buffer]:
        """The buffers that lived when the primitive `at` was evaluated."""
        return [
            record.buffer
            for record in self.records.values()
            if record.buffer.born <= at and (record.died is None or record.died >= at)
        ]
