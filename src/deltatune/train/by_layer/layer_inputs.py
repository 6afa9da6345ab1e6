"""Keeps the inputs of layers from the forward pass to the backward pass: in memory, or in files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ...errors import UserError, first_line
from .disk_time import DiskTime

# The folder of rank 0 is `layer_inputs_0` in the run's own, and is there while the run goes on.
INPUTS = "layer_inputs"
# Seconds within which MLX returns arrays that are computed already.
_AT_ONCE = 0.001


class LostInputsError(UserError):
    """The inputs of layers cannot be written, or cannot be read again."""

    remedy = "make room there"


class KeepsInputs(Protocol):
    """Keeps one array after another, and gives back the last one first."""

    def clear(self) -> None:
        """Drop the kept arrays, since a pass that was left has not taken them back."""

    def keep(self, x: mx.array, computing: Any) -> None:
        """Keep an array, while `computing`, a tree of arrays, is computed from it."""

    def take(self) -> mx.array:
        """Give back the array that was kept last."""

    def close(self) -> None:
        """Drop the kept arrays for good."""


class InputsInMemory:
    """Keeps arrays as they are."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []

    def clear(self) -> None:
        """Drop the kept arrays."""
        self._arrays = []

    def keep(self, x: mx.array, computing: Any) -> None:
        """Keep an array."""
        self._arrays.append(x)

    def take(self) -> mx.array:
        """Give back the array that was kept last."""
        return self._arrays.pop()

    def close(self) -> None:
        """Drop the kept arrays."""
        self.clear()


class InputsOnDisk:
    """Writes arrays to files, and prefetches them while the passes compute.

    An array is written while the layer that it enters computes. Going back, one array is in use and the next one is
    being read.

    Args:
        folder: The folder for the files. It is made when it is first needed, and close() removes it.
        disk: Counts the bytes read, and the passes' time of waiting for reads and writes.
    """

    def __init__(self, folder: Path, disk: DiskTime):
        self._folder, self._disk = folder, disk
        # Files are read on a stream of their own, beside that of the computation.
        self._stream = mx.new_stream(mx.cpu)
        self._count = 0
        self._ahead: mx.array | None = None

    def clear(self) -> None:
        """Drop the kept arrays; their files are written over."""
        self._count, self._ahead = 0, None

    def keep(self, x: mx.array, computing: Any) -> None:
        """Write an array while `computing`, a tree of arrays, is computed from it.

        Raises:
            LostInputsError: It cannot be written, because the disk is full for example.
        """
        mx.async_eval(computing)
        mx.eval(x)
        started = time.perf_counter()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(self._file), {"x": x})
        except (OSError, RuntimeError) as error:
            # The state of the run needs room as well.
            self.close()
            raise self._lost(error) from error
        self._count += 1
        written = time.perf_counter()
        mx.eval(computing)
        # A layer that still computes when its input is written did not wait for that.
        if time.perf_counter() - written < _AT_ONCE:
            self._disk.waited += written - started

    def take(self) -> mx.array:
        """Return the array that was written last, and start to read the one before it.

        Raises:
            LostInputsError: It cannot be read any more.
        """
        if self._ahead is None:
            self._start()
        array, self._ahead = self._ahead, None
        started = time.perf_counter()
        try:
            mx.eval(array)
            self._file.unlink()
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error
        assert array is not None
        self._disk.waited += time.perf_counter() - started
        self._disk.read += array.nbytes
        if self._count:
            self._start()
        return array

    def close(self) -> None:
        """Remove the files."""
        self.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _file(self) -> Path:
        return self._folder / f"{self._count}.safetensors"

    def _start(self) -> None:
        """Start to read the file before the one that was read last."""
        self._count -= 1
        try:
            with mx.stream(self._stream):
                content: Any = mx.load(str(self._file))
            self._ahead = content["x"]
            mx.async_eval(self._ahead)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> LostInputsError:
        return LostInputsError(f"{self._folder}: inputs of layers cannot be kept there ({first_line(error)})")
