"""Hands out the weights of a model's layers: from memory, from the host's memory, or from the checkpoint's files.

Training by layers, evaluation and answers read through one store. MLX loads a checkpoint lazily: an array is read when
it is first used, and then stays in memory. So the files' tensors are loaded again, lazily, whenever an array is needed
that was used before. The model's own changes to them (joined experts, transposed convolutions) are thereby made again,
and no layout of files is known here. Where loading does more to tensors than the model itself, as with AWQ's packed
weights, the model is built again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError, first_line
from ...machine import backend, host_memory
from ...machine.disk import PageCache
from ...models.checkpoint_files import weight_files
from ...models.layer_caches import kept_by_recurrence
from ...models.load import load_model, load_vision_tower
from ...models.stored_names import stored_parameters
from ...models.vision.split import has_vision
from ...ops.functional import undisturbed
from ..tree import Place, array_places, arrays_at, leaves, put
from .layer_calls import LayerCalls
from .layer_inputs import DiskTime, LayerInputs


class UnreadableWeightsError(UserError):
    """The files of a model have changed or cannot be read any more, while a run reads them."""

    remedy = "mend the files"


def cached(path: Path) -> bool:
    """Whether a checkpoint stays in the system's page cache: its files take at most half of the free memory."""
    free = host_memory.free()
    return free is not None and sum(file.stat().st_size for file in weight_files(path)) <= free // 2


class ResidentLayers:
    """Layers with arrays that all stay in memory; `inputs` keeps the layers' inputs for the backward pass."""

    def __init__(self, layers: Sequence[nn.Module], inputs: LayerInputs | None = None):
        self.inputs = inputs or LayerInputs()
        self._take(layers)

    def _take(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self._places: list[list[Place]] = [[place for _, place in array_places(layer)] for layer in layers]

    def along(self, order: Sequence[int]) -> Iterator[list[mx.array]]:
        """Yield the arrays of the layers in `order`, as array_places() lists them."""
        for index in order:
            yield arrays_at(self._places[index])

    def stays(self, index: int) -> bool:
        """Whether the layer at a position may be computed while the next one is begun."""
        return False

    def calls(self, compute: Callable[..., None] = mx.eval) -> LayerCalls:
        """Return the calls of the layers; one that nobody else serves reads the layer's weights, and is computed.

        `compute` computes a layer's output before the next one begins; a plan only notes it.
        """
        count = len(self.layers)

        def read(index: int, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            with undisturbed(self.layers[index]):
                put(self._places[index], next(self.along([index, (index + 1) % count])))
                y = call(*arguments, **options)
                compute(y, kept_by_recurrence([*arguments, *options.values()]))
            return y

        return LayerCalls(self.layers, read)


class Store(ResidentLayers):
    """The weights of a model that was loaded lazily, of which some layers' frozen ones stay on the disk or the host.

    A layer's other arrays, such as adapters, stay in memory, and so do all arrays outside the layers. The model's own
    arrays in the place of weights on the disk are lazy, and are never computed. Make it of the model as it was loaded,
    before adapters are added, call find() after that, and place() once it is known which layers stay on the disk.
    `names` has the files' names of arrays by their paths in the prepared model; MLX counts the bytes `on_host` as its
    own.
    """

    def __init__(self, path: Path, model: nn.Module, *, trust_remote_code: bool = False):
        super().__init__(())
        self.path = path
        self.names: dict[str, str] = {}
        self.disk = DiskTime()
        self.on_host = 0
        self._trust = trust_remote_code
        self._model = model
        # The arrays are held, since an id is an array's only while the array lives.
        self._read_from = {id(array): (name, array) for name, array in leaves(model.parameters())}
        self._kinds = {name: _kind(array) for name, array in self._read_from.values()}
        self._files = weight_files(path)
        self._versions = list(map(_version, self._files))
        self._cache = PageCache(self._files)
        self._cached = cached(path)
        # Files are read on a stream of their own, beside that of the computation.
        self._stream = mx.new_stream(mx.cpu)
        self._unread: dict[str, mx.array] = {}
        self._in_host_memory: dict[str, mx.array] = {}
        # For each layer, the names of its arrays that do not stay in memory, by their positions among its arrays.
        self._names: list[dict[int, str]] = []
        self._on_disk: set[str] = set()
        self._held: tuple[int, list[mx.array]] | None = None
        self._ahead: tuple[int, list[mx.array]] | None = None

    def find(self, model: nn.Module) -> None:
        """Find the arrays in the model, after adapters were added and before anything is traced or computed.

        They are found by identity, which they lose when MLX traces a function of the model.
        """
        read_from = [(path, self._read_from.get(id(place.array))) for path, place in array_places(model)]
        self.names = {path: place_read[0] for path, place_read in read_from if place_read is not None}
        self._read_from = {}

    def place(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        streamed: Collection[int],
        *,
        on_host: bool = False,
        disk: DiskTime | None = None,
        inputs: LayerInputs | None = None,
    ) -> None:
        """Read the arrays of the model that stay in memory, all but the weights of the `streamed` layers.

        Those `on_host` are read once, into the host's memory, and copied to the GPU from there. UserError where
        NVIDIA's driver does not leave them there.
        """
        self._take(layers)
        self.disk = disk or DiskTime(of="the host's memory" if on_host else "the disk")
        self.inputs = inputs or self.inputs
        paths = {id(module): path for path, module in model.named_modules()}
        for index, layer in enumerate(layers):
            inside = [f"{paths[id(layer)]}.{path}" for path, _ in array_places(layer)]
            names = {at: self.names[path] for at, path in enumerate(inside) if path in self.names}
            self._names.append(names if index in streamed else {})
        self._on_disk = {name for names in self._names for name in names.values()}
        if on_host:
            self._hold_on_host()
        # A layer at a time; the rest stays lazy.
        for places, names in zip(self._places, self._names, strict=True):
            mx.eval([place.array for at, place in enumerate(places) if at not in names])
            # Computed arrays may depend on weights, as DoRA's lengths do: these are left lazy again.
            for at, array in zip(names, self.lazily(list(names.values())), strict=True):
                places[at].array = array
        in_layers = {id(place.array) for places in self._places for place in places}
        mx.eval([place.array for _, place in array_places(model) if id(place.array) not in in_layers])
        if backend.has_own_memory():
            # What planning and reading have freed counts on the GPU as if it were in use.
            backend.give_back()

    def _hold_on_host(self) -> None:
        """Read all arrays that will be needed into main memory, a layer at a time; lazily() then gives copies.

        On an NVIDIA GPU they stay in the host's memory, and the copies are the GPU's.
        """
        held: dict[str, mx.array] = {}
        for names in filter(None, self._names):
            arrays = self.started(list(names.values()))
            self.wait(arrays)
            if backend.has_own_memory() and not host_memory.stay(arrays):
                raise UserError("memory: NVIDIA's driver leaves no arrays in the host's memory; update it.")
            held |= zip(names.values(), arrays, strict=True)
        self._in_host_memory = held
        self.on_host = sum(array.nbytes for array in held.values())

    def close(self) -> None:
        """Let go of the arrays that were read, and of the files, which the system may cache again."""
        self._held = self._ahead = None
        self.inputs.close()
        self._unread.clear()
        self._cache.close()
        if self._in_host_memory:
            # The driver's advice belongs to buffers that MLX would use again for others.
            self._in_host_memory = {}
            mx.clear_cache()

    def along(self, order: Sequence[int]) -> Iterator[list[mx.array]]:
        """Yield the arrays of the layers in `order`, as array_places() lists them.

        While a layer is in use, the next one is read that does not stay in memory. The layer read last is kept, so that
        a pass in the opposite order begins with it. UnreadableWeightsError where the files have changed, or cannot be
        read.
        """
        for at, index in enumerate(order):
            names = self._names[index]
            arrays = arrays_at(self._places[index])
            if names:
                if self._held is None or self._held[0] != index:
                    self._held = None
                    self._held = index, self._arrived(index)
                for place, array in zip(names, self._held[1], strict=True):
                    arrays[place] = array
            self._start(next((other for other in order[at + 1 :] if self._names[other] and other != index), None))
            yield arrays

    def stays(self, index: int) -> bool:
        """Whether the layer at a position may be computed while the next one is begun.

        An NVIDIA GPU waits for the CPU otherwise, at each layer. A layer's input and its weights must stay where they
        are: else the memory of several layers would be needed at once.
        """
        in_memory = not self._names[index] and type(self.inputs) is LayerInputs
        return in_memory and backend.launches_ahead()

    def numbers(self, path: str, array: mx.array) -> mx.array:
        """Return the parameter at a path of the model, which holds `array`: that array, or one that is read anew."""
        name = self.names.get(path)
        if name is None or name not in self._on_disk:
            return array
        if name in self._in_host_memory:
            return self._in_host_memory[name]
        read = self.lazily([name])
        self.wait(read)
        return read[0]

    def _start(self, index: int | None) -> None:
        if index is None or self._ahead is not None:
            return
        started = time.perf_counter()
        self._ahead = index, self.started(list(self._names[index].values()))
        self.disk.waited += time.perf_counter() - started

    def _arrived(self, index: int) -> list[mx.array]:
        if self._ahead is None or self._ahead[0] != index:
            self._ahead = None
            self._start(index)
        assert self._ahead is not None
        arrays = self._ahead[1]
        self._ahead = None
        started = time.perf_counter()
        self.wait(arrays)
        self.disk.waited += time.perf_counter() - started
        self.disk.read += sum(array.nbytes for array in arrays)
        return arrays

    def lazily(self, names: Sequence[str]) -> list[mx.array]:
        """Return arrays that are read when they are used; UnreadableWeightsError where the files have changed."""
        held = self._in_host_memory
        if any(name not in self._unread for name in names if name not in held):
            self._load()
        # A layer may hold one array in two places. A copy with its bits: mx.contiguous() would share its memory.
        arrays = {
            name: mx.where(mx.array(True), held[name], held[name]) if name in held else self._unread.pop(name)
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

        UnreadableWeightsError where they cannot be read.
        """
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise self._unreadable(error) from error
        if self._in_host_memory:
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
        if has_vision(self._model):
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


def _kind(array: mx.array) -> tuple[tuple[int, ...], mx.Dtype]:
    return array.shape, array.dtype


def _version(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
