"""Keeps the inputs of layers in the host's memory from the forward pass to the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...machine import backend
from ...machine.numpy_arrays import as_numpy
from ...ops.kernels.pinned_copies import PinnedRoom
from .disk_time import DiskTime
from .layer_inputs import LostInputsError


class Room(Protocol):
    """Memory of the host for one array at a time."""

    size: int

    def write(self, x: mx.array) -> mx.array:
        """Copy an array into the room; return an array that is computed after the copy."""

    def read(self) -> mx.array:
        """Return the array that was written, computed from the room."""

    def free(self) -> None:
        """Give the memory back; nothing may be copied any more."""


class PlainRoom:
    """NumPy's memory for one array, where MLX's arrays lie in the host's memory anyway.

    Args:
        size: Its bytes.
    """

    def __init__(self, size: int):
        self.size, self._bytes = size, np.empty(size, np.uint8)
        self._kind: tuple[tuple[int, ...], mx.Dtype] = (), mx.float32

    def write(self, x: mx.array) -> mx.array:
        """Copy an array into the room."""
        self._kind = x.shape, x.dtype
        self._bytes[: x.nbytes] = as_numpy(x.reshape(-1).view(mx.uint8))
        return mx.array(0)

    def read(self) -> mx.array:
        """Return the array that was written."""
        shape, dtype = self._kind
        size = int(np.prod(shape)) * dtype.size
        return mx.array(self._bytes[:size]).view(dtype).reshape(shape)

    def free(self) -> None:
        """Give the memory back."""
        self._bytes = np.empty(0, np.uint8)


class InputsOnHost:
    """Offloads arrays to the host's memory, and prefetches them while the passes compute.

    An array is copied while the layer that it enters computes. Going back, one array is in use and the next one is
    being copied. The host's memory is taken at the first step, and used again until close().

    Args:
        disk: Counts the bytes copied back, and the passes' time of waiting for them.
        room: Takes the host's memory for an array of so many bytes. MemoryError if there is none.
    """

    def __init__(self, disk: DiskTime, room: Callable[[int], Room] | None = None):
        self._disk = disk
        self._room = room or (PinnedRoom if backend.has_own_memory() else PlainRoom)
        # Copies have a stream of their own, beside that of the computation, and follow one another.
        self._stream = mx.new_stream(mx.default_device())
        self._rooms: list[Room] = []
        self._count = 0
        self._copying: mx.array | None = None
        self._ahead: mx.array | None = None

    def clear(self) -> None:
        """Drop the kept arrays; their rooms are written over."""
        # MLX would use the memory of an array again that is still being copied to.
        mx.eval([array for array in (self._copying, self._ahead) if array is not None])
        self._count, self._copying, self._ahead = 0, None, None

    def keep(self, x: mx.array, computing: Any) -> None:
        """Copy an array while `computing`, a tree of arrays, is computed from it.

        Raises:
            LostInputsError: The host's memory has no room for it.
        """
        # The array before this one holds the device's memory until it is copied.
        self._waited_for(self._copying)
        mx.async_eval(computing)
        room = self._room_for(x.nbytes)
        with mx.stream(self._stream):
            self._copying = room.write(x)
        mx.async_eval(self._copying)
        self._count += 1

    def take(self) -> mx.array:
        """Return the array that was kept last, and start to copy the one before it."""
        if self._ahead is None:
            self._start()
        array, self._ahead = self._ahead, None
        assert array is not None
        self._waited_for(array)
        self._disk.read += array.nbytes
        if self._count:
            self._start()
        return array

    def close(self) -> None:
        """Drop the kept arrays, and give the host's memory back."""
        self.clear()
        mx.synchronize(self._stream)
        for room in self._rooms:
            room.free()
        self._rooms = []

    def _waited_for(self, array: mx.array | None) -> None:
        if array is not None:
            started = time.perf_counter()
            mx.eval(array)
            self._disk.waited += time.perf_counter() - started

    def _start(self) -> None:
        """Start to copy the array before the one that was copied last."""
        self._count -= 1
        with mx.stream(self._stream):
            self._ahead = self._rooms[self._count].read()
        mx.async_eval(self._ahead)

    def _room_for(self, size: int) -> Room:
        """Return the room for the next array."""
        at, known = self._count, len(self._rooms)
        if at < known and self._rooms[at].size >= size:
            return self._rooms[at]
        try:
            if at < known:
                # Arrays read from it for an earlier step have been used.
                mx.synchronize(self._stream)
                self._rooms.pop(at).free()
            self._rooms.insert(at, self._room(size))
        except MemoryError as error:
            # The state of the run needs memory as well.
            self.close()
            raise LostInputsError(f"The host's memory has no room for inputs of layers ({error})") from error
        return self._rooms[at]
