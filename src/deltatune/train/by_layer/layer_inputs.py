"""Keeps the inputs of layers from the forward pass to the backward pass: in memory, on the host, or in files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import UserError, first_line
from ...ops.kernels.pinned_copies import PinnedRoom

# The folder of rank 0 is `layer_inputs_0` in the run's own, and is there while the run goes on.
INPUTS = "layer_inputs"
# Seconds within which MLX returns arrays that are computed already.
_AT_ONCE = 0.001
# A run that waits for a larger share of its time is told how to wait less.
_MUCH = 0.1


class LostInputsError(UserError):
    """The inputs of layers cannot be written, or cannot be read again."""

    remedy = "make room there"


@dataclass
class DiskTime:
    """The seconds that passes waited so far for weights, and for inputs of layers to be written and read.

    Writing counts as a whole where the layer beside it took less. `read` counts bytes, and `of` names the store.
    """

    waited: float = 0.0
    read: int = 0
    of: str = "the disk"

    def said(self, seconds: float) -> str:
        """Return a line for the end of a run that has computed for so many seconds."""
        share = self.waited / seconds if seconds else 0.0
        advice = ""
        if share > _MUCH:
            advice = " More tokens an iteration (--batch-size, --max-seq-length, --pack) would hide it."
        return f"Waited {self.waited:.1f} s for {self.of} ({share:.0%}), which gave {self.read / 1e9:,.2f} GB.{advice}"


class LayerInputs:
    """Keeps one array after another in memory, and gives back the last one first."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []

    def clear(self) -> None:
        """Drop the kept arrays, since a pass that was left has not taken them back."""
        self._arrays = []

    def keep(self, x: mx.array, computing: Any) -> None:
        """Keep an array, while `computing`, a tree of arrays, is computed from it."""
        self._arrays.append(x)

    def take(self) -> mx.array:
        """Give back the array that was kept last."""
        return self._arrays.pop()

    def close(self) -> None:
        """Drop the kept arrays for good."""
        self.clear()


class _Offloaded(LayerInputs):
    """Keeps arrays outside the device's memory, and prefetches them while the passes compute.

    An array is copied while the layer that it enters computes. Going back, one array is in use and the next one is
    being read. Copies have a stream of their own, beside that of the computation, and follow one another.
    """

    def __init__(self, disk: DiskTime, device: mx.Device):
        super().__init__()
        self._disk = disk
        self._stream = mx.new_stream(device)
        self._count = 0
        self._ahead: mx.array | None = None

    def clear(self) -> None:
        self._count = 0
        self._ahead = None

    def take(self) -> mx.array:
        if self._ahead is None:
            self._start()
        array = self._ahead
        self._ahead = None
        assert array is not None
        started = time.perf_counter()
        self._arrive(array)
        self._disk.waited += time.perf_counter() - started
        self._disk.read += array.nbytes
        if self._count:
            self._start()
        return array

    def _start(self) -> None:
        self._count -= 1
        with mx.stream(self._stream):
            self._ahead = self._copy(self._count)
        mx.async_eval(self._ahead)

    def _copy(self, at: int) -> mx.array:
        """Return the array that was kept at a position, lazily."""
        raise NotImplementedError

    def _arrive(self, array: mx.array) -> None:
        mx.eval(array)


class InputsOnDisk(_Offloaded):
    """Writes arrays to files in a folder, which is made when it is first needed, and which close() removes.

    keep() and take() raise a LostInputsError where a file cannot be written, because the disk is full for example, or
    cannot be read any more. The files are then removed, since the state of the run needs room as well.
    """

    def __init__(self, folder: Path, disk: DiskTime):
        super().__init__(disk, mx.Device(mx.cpu))
        self._folder = folder

    def keep(self, x: mx.array, computing: Any) -> None:
        mx.async_eval(computing)
        mx.eval(x)
        started = time.perf_counter()
        with self._files():
            self._folder.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(self._file(self._count)), {"x": x})
        self._count += 1
        written = time.perf_counter()
        mx.eval(computing)
        # A layer that still computes when its input is written did not wait for that.
        if time.perf_counter() - written < _AT_ONCE:
            self._disk.waited += written - started

    def take(self) -> mx.array:
        with self._files():
            return super().take()

    def close(self) -> None:
        """Remove the files."""
        self.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy(self, at: int) -> mx.array:
        content: Any = mx.load(str(self._file(at)))
        return content["x"]

    def _arrive(self, array: mx.array) -> None:
        mx.eval(array)
        self._file(self._count).unlink()

    def _file(self, at: int) -> Path:
        return self._folder / f"{at}.safetensors"

    @contextmanager
    def _files(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.close()
            raise LostInputsError(
                f"{self._folder}: inputs of layers cannot be kept there ({first_line(error)})"
            ) from error


class InputsOnHost(_Offloaded):
    """Copies arrays to the host's memory, which is taken at the first step and used again until close().

    `room` takes the host's memory for an array of so many bytes; a MemoryError says that there is none.
    """

    def __init__(self, disk: DiskTime, room: Callable[[int], PinnedRoom] = PinnedRoom):
        super().__init__(disk, mx.default_device())
        self._room = room
        self._rooms: list[PinnedRoom] = []
        self._copying: mx.array | None = None

    def clear(self) -> None:
        # MLX would use the memory of an array again that is still being copied to.
        mx.eval([array for array in (self._copying, self._ahead) if array is not None])
        self._copying = None
        super().clear()

    def keep(self, x: mx.array, computing: Any) -> None:
        """Copy an array while `computing` is computed from it; LostInputsError without room in the host's memory."""
        if self._copying is not None:
            # The array before this one holds the device's memory until it is copied.
            started = time.perf_counter()
            mx.eval(self._copying)
            self._disk.waited += time.perf_counter() - started
        mx.async_eval(computing)
        room = self._room_for(x.nbytes)
        with mx.stream(self._stream):
            self._copying = room.write(x)
        mx.async_eval(self._copying)
        self._count += 1

    def close(self) -> None:
        """Drop the kept arrays, and give the host's memory back."""
        self.clear()
        mx.synchronize(self._stream)
        for room in self._rooms:
            room.free()
        self._rooms = []

    def _copy(self, at: int) -> mx.array:
        return self._rooms[at].read()

    def _room_for(self, size: int) -> PinnedRoom:
        at = self._count
        known = len(self._rooms)
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
