"""Reads the frozen weights of a model from its checkpoint's files, as often as they are needed.

MLX loads a checkpoint lazily: an array that was loaded is read when it is first used, and then stays in memory. So the
files' tensors are loaded again, lazily, whenever an array is needed that was used before. The model's own changes to
them (joined experts, transposed convolutions) are thereby made again, and no layout of files is known here. Where
loading does more to tensors than the model itself, as with AWQ's packed weights, the model is built again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError, first_line
from ...machine import backend, host_memory
from ...machine.page_cache import PageCache
from ...models.checkpoint_files import weight_files
from ...models.load import load_model, load_vision_tower
from ...models.stored_names import stored_parameters
from ...models.vision.split import has_vision
from ..tree import leaves
from .layer_functions import array_places


class UnreadableWeightsError(UserError):
    """The files of a model have changed or cannot be read any more, while a run reads them."""

    remedy = "mend the files"


def cached(path: Path) -> bool:
    """Whether a checkpoint stays in the system's page cache: its files take at most half of the free memory."""
    free = host_memory.free()
    return free is not None and sum(file.stat().st_size for file in weight_files(path)) <= free // 2


class StoredWeights:
    """The arrays of a model that was loaded lazily, and the way to have them again.

    Args:
        path: The folder of the checkpoint.
        model: The model as it was loaded. Call it before adapters are added, so that all its arrays are the files'.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Attributes:
        path: The folder.
        names: The name of each of these arrays by its path in the prepared model, once find() was called.
    """

    def __init__(self, path: Path, model: nn.Module, *, trust_remote_code: bool = False):
        self.path, self._trust, self._sees = path, trust_remote_code, has_vision(model)
        # The arrays are held, since an id is an array's only while the array lives.
        self._read_from = {id(array): (name, array) for name, array in leaves(model.parameters())}
        self._model, self._kinds = model, {name: _kind(array) for name, array in self._read_from.values()}
        self.names: dict[str, str] = {}
        self._files = weight_files(path)
        self._versions = list(map(_version, self._files))
        self._cache, self._cached = PageCache(self._files), cached(path)
        self._held: dict[str, mx.array] = {}
        # Files are read on a stream of their own, beside that of the computation.
        self._stream = mx.new_stream(mx.cpu)
        self._unread: dict[str, mx.array] = {}

    def find(self, model: nn.Module) -> None:
        """Find the arrays in the model, after adapters were added and before anything is traced or computed.

        They are found by identity, which they lose when MLX traces a function of the model.
        """
        read_from = [(path, self._read_from.get(id(place.array))) for path, place in array_places(model)]
        self.names = {path: place_read[0] for path, place_read in read_from if place_read is not None}
        self._read_from = {}

    def close(self) -> None:
        """Let the system cache the files again."""
        self._unread.clear()
        self._cache.close()
        if self._held:
            # The driver's advice belongs to buffers that MLX would use again for others.
            self._held = {}
            mx.clear_cache()

    def hold(self, groups: Sequence[Sequence[str]]) -> int:
        """Read all arrays that will be needed into main memory, a group at a time; lazily() then gives copies.

        On an NVIDIA GPU they stay in the host's memory, and the copies are the GPU's.

        Args:
            groups: Their names.

        Returns:
            Their bytes.

        Raises:
            UserError: NVIDIA's driver does not leave them there.
        """
        held: dict[str, mx.array] = {}
        for names in groups:
            arrays = self.started(names)
            self.wait(arrays)
            if backend.has_own_memory() and not host_memory.stay(arrays):
                raise UserError("memory: NVIDIA's driver leaves no arrays in the host's memory; update it.")
            held |= zip(names, arrays, strict=True)
        self._held = held
        return sum(array.nbytes for array in held.values())

    def lazily(self, names: Sequence[str]) -> list[mx.array]:
        """Return arrays that are read when they are used.

        Raises:
            UnreadableWeightsError: The files have changed, or are gone.
        """
        if any(name not in self._unread for name in names if name not in self._held):
            self._load()
        # A layer may hold one array in two places.
        arrays = {
            name: _copied(self._held[name]) if name in self._held else self._unread.pop(name)
            for name in dict.fromkeys(names)
        }
        return [arrays[name] for name in names]

    def started(self, names: Sequence[str]) -> list[mx.array]:
        """Return arrays that are being read."""
        arrays = self.lazily(names)
        try:
            mx.async_eval(arrays)
        except RuntimeError as error:
            raise self._unreadable(error) from error
        return arrays

    def wait(self, arrays: Sequence[mx.array]) -> None:
        """Wait until `arrays` are read, and drop their pages from the system's page cache.

        Raises:
            UnreadableWeightsError: They cannot be read.
        """
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise self._unreadable(error) from error
        if self._held:
            return
        self._check()
        if not self._cached:
            self._cache.drop()

    def _load(self) -> None:
        self._check()
        with mx.stream(self._stream):
            self._unread = stored_parameters(self._model, self.path)
            if any(name not in self._unread or _kind(self._unread[name]) != self._kinds[name] for name in self._kinds):
                self._unread = dict(leaves(self._built_again().parameters()))

    def _built_again(self) -> nn.Module:
        if self._sees:
            return load_vision_tower(self.path)
        return load_model(self.path, trust_remote_code=self._trust, lazy=True)[0]

    def _check(self) -> None:
        for file, version in zip(self._files, self._versions, strict=True):
            try:
                now = _version(file)
            except OSError as error:
                raise self._unreadable(error) from error
            if now != version:
                raise UnreadableWeightsError(f"{file}: the file has changed while the run reads weights from it")

    def _unreadable(self, error: Exception) -> UnreadableWeightsError:
        return UnreadableWeightsError(f"{self.path}: the weights cannot be read any more ({first_line(error)})")


def _copied(array: mx.array) -> mx.array:
    """Return a copy of an array with its bits, made by the default device; mx.contiguous() would share its memory."""
    return mx.where(mx.array(True), array, array)


def _kind(array: mx.array) -> tuple[tuple[int, ...], mx.Dtype]:
    return array.shape, array.dtype


def _version(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
