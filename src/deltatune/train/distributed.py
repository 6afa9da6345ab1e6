"""Connects the ranks of a data-parallel run over mx.distributed.

Each rank trains on its own rows, gradients and losses are summed over the ranks, and rank 0 prints and writes files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from ..errors import UserError
from .tree import leaves, parted
from .tree import number as to_number

# The backends that mx.distributed.init() tries, in its order.
BACKENDS = ("nccl", "ring", "mpi", "jaccl")
# Gradients are sent in messages of about this many bytes: few messages, of which the first leave before the last exist.
MESSAGE_BYTES = 16 * 2**20


class World:
    """The ranks of a run. Without a launcher there is one rank, and sums over it are the numbers themselves.

    Attributes:
        backend: The transport between ranks: `nccl`, `ring`, `mpi` or `jaccl`; None where there is one rank.
        rank: The number of this process, from 0.
        size: How many processes train together.
    """

    def __init__(self) -> None:
        self.backend, self.group = _join()
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()

    def _stream(self) -> mx.Stream:
        """Return this thread's stream for messages: the GPU's default stream under NCCL, a CPU stream of its own else.

        NCCL requires a GPU's stream. One of its own would let messages travel while the GPU computes, but steps take
        7 % longer with it (docs/decisions/nvidia-step.md). All messages share the stream, which keeps their order.
        """
        return mx.default_stream(mx.gpu) if self.backend == "nccl" else _cpu_stream_of(threading.get_ident())

    @property
    def main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def sum(self, array: mx.array) -> mx.array:
        """Return the sum of `array` over the ranks. It is lazy: every rank must evaluate it."""
        if self.size == 1:
            return array
        return mx.distributed.all_sum(array, group=self.group, stream=self._stream())

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Return the sums of Python numbers over the ranks, in fp32, the same on every rank. Waits for every rank."""
        if self.size == 1:
            return list(numbers)
        total = self.sum(mx.array(numbers, mx.float32))
        mx.eval(total)
        return [float(number) for number in total.tolist()]  # type: ignore[union-attr, arg-type]

    def sum_tree(self, tree: Any) -> Any:
        """Return `tree` with every leaf summed over the ranks. The sums are lazy: every rank must evaluate them.

        Leaves of one dtype are joined into few messages. The last leaves are sent first: a backward pass ends with the
        first layers, so that the first messages of the CPU's backends leave while it still runs.
        """
        if self.size == 1:
            return tree
        summed: dict[str, mx.array] = {}
        for message in _messages(reversed(leaves(tree))):
            arrays = [leaf for _, leaf in message]
            total = self.sum(arrays[0] if len(arrays) == 1 else mx.concatenate([leaf.reshape(-1) for leaf in arrays]))
            parts = [total] if len(arrays) == 1 else parted(total, [leaf.shape for leaf in arrays])
            summed |= zip((path for path, _ in message), parts, strict=True)
        return tree_map_with_path(lambda path, _: summed[path], tree)

    def gather(self, array: mx.array) -> mx.array:
        """Return `array` of every rank, stacked in rank order along a new first axis. Waits for every rank."""
        if self.size == 1:
            return array[None]
        gathered = mx.distributed.all_gather(array[None], group=self.group, stream=self._stream())
        # It is evaluated here, on every rank, because a rank that never used it would leave the others waiting.
        mx.eval(gathered)
        return gathered

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. Waits for every rank."""
        content = text.encode()
        padded = content.ljust(int(self.largest(len(content))), b"\0")
        rows = self.gather(mx.array(list(padded), mx.uint8)).tolist()
        return [bytes(row).rstrip(b"\0").decode() for row in rows]  # type: ignore[union-attr, arg-type]

    def do_on_main(self, call: Callable[[], object], task: str) -> None:
        """Call `call` on rank 0, and raise on every rank if it raises a UserError; `task` describes it."""
        problem: UserError | None = None
        try:
            if self.main:
                call()
        except UserError as error:
            problem = error
        if self.sum_numbers(float(problem is not None))[0]:
            problem = problem or UserError(f"rank 0 could not {task}; its message says why.")
            problem.everywhere = True
            raise problem

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' numbers, in fp32. Waits for every rank."""
        return number if self.size == 1 else to_number(self.gather(mx.array(number, mx.float32)).max())


def _join() -> tuple[str | None, mx.distributed.Group]:
    """Return the backend that connects this process with the others of its launcher, and the group of all of them."""
    for name in BACKENDS:
        # mx.distributed.init() does the same, but does not say which backend it chose.
        if name == "nccl" and not mx.cuda.is_available():
            continue
        group = mx.distributed.init(backend=name)
        if group.size() > 1:
            return name, group
    return None, mx.distributed.init()


@cache
def _cpu_stream_of(thread: int) -> mx.Stream:
    return mx.new_thread_unsafe_stream(mx.cpu)


def _messages(flat: Iterable[tuple[str, mx.array]]) -> Iterator[list[tuple[str, mx.array]]]:
    """Group leaves into messages of one dtype and about MESSAGE_BYTES each, in order; a larger leaf goes alone."""
    waiting: dict[mx.Dtype, list[tuple[str, mx.array]]] = {}
    for path, leaf in flat:
        if leaf.nbytes >= MESSAGE_BYTES:
            yield [(path, leaf)]
            continue
        message = waiting.setdefault(leaf.dtype, [])
        message.append((path, leaf))
        if sum(array.nbytes for _, array in message) >= MESSAGE_BYTES:
            yield waiting.pop(leaf.dtype)
    yield from waiting.values()
