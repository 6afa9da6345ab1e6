"""Hands out the arrays of one layer after another; those that do not stay in memory are read while others compute."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn

from ...machine import backend
from ..tree import Place
from .disk_time import DiskTime
from .layer_functions import array_places
from .layer_inputs import InputsInMemory, KeepsInputs
from .stored_weights import StoredWeights


class LayerWeights:
    """The arrays of a model's layers, of which some layers' frozen weights stay on the disk.

    A layer's other arrays, such as adapters, stay in memory, and so do all arrays outside the layers. The model's own
    arrays in the place of weights on the disk are lazy, and are never computed.

    Args:
        stored: Which arrays of the model lie in its files (find() was called).
        model: The model, made trainable.
        layers: Its layers, in order.
        streamed: The positions of the layers with weights that stay on the disk.
        on_host: Whether these are read once, into the host's memory, and copied to the GPU from there.
        disk: The time spent waiting for reads, which is counted here.
        inputs: Keeps the inputs of layers for the backward pass; in memory by default.

    Attributes:
        disk: The argument.
        on_host: The bytes in the host's memory, which MLX counts as its own.
        inputs: The argument.
    """

    def __init__(
        self,
        stored: StoredWeights,
        model: nn.Module,
        layers: Sequence[nn.Module],
        streamed: Collection[int],
        *,
        on_host: bool = False,
        disk: DiskTime | None = None,
        inputs: KeepsInputs | None = None,
    ):
        self._stored = stored
        self.disk = disk or DiskTime()
        self.inputs = inputs or InputsInMemory()
        self._places: list[list[Place]] = []
        self._names: list[dict[int, str]] = []
        paths = {id(module): path for path, module in model.named_modules()}
        for index, layer in enumerate(layers):
            by_path = {f"{paths[id(layer)]}.{path}": place for path, place in array_places(layer)}
            self._places.append(list(by_path.values()))
            names = {at: stored.names[path] for at, path in enumerate(by_path) if path in stored.names}
            self._names.append(names if index in streamed else {})
        self._held: tuple[int, list[mx.array]] | None = None
        self._ahead: tuple[int, list[mx.array]] | None = None
        on_disk = {name for names in self._names for name in names.values()}
        self._by_path = {path: name for path, name in stored.names.items() if name in on_disk}
        self.on_host = 0
        if on_host:
            self.on_host = stored.hold([list(names.values()) for names in self._names if names])
        self._settle(model)

    def _settle(self, model: nn.Module) -> None:
        """Compute the arrays that stay in memory, a layer at a time, and leave the rest lazy."""
        for places, names in zip(self._places, self._names, strict=True):
            mx.eval([place.array for at, place in enumerate(places) if at not in names])
            # Computed arrays may depend on weights, as DoRA's lengths do: these are left lazy again.
            for at, array in zip(names, self._stored.lazily(list(names.values())), strict=True):
                places[at].array = array
        inside = {id(place.array) for places in self._places for place in places}
        mx.eval([place.array for _, place in array_places(model) if id(place.array) not in inside])

    def close(self) -> None:
        """Let go of the arrays that were read, and of the files."""
        self._held = self._ahead = None
        self.inputs.close()
        self._stored.close()

    def along(self, order: Sequence[int]) -> Iterator[list[mx.array]]:
        """Yield the arrays of the layers in `order`, as array_places() lists them.

        While a layer is in use, the next one is read that does not stay in memory. The layer read last is kept, so that
        a pass in the opposite order begins with it.

        Raises:
            UnreadableWeightsError: The files have changed, or cannot be read.
        """
        for at, index in enumerate(order):
            places, names = self._places[index], self._names[index]
            arrays = [place.array for place in places]
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
        in_memory = not self._names[index] and isinstance(self.inputs, InputsInMemory)
        return in_memory and backend.launches_ahead()

    def _start(self, index: int | None) -> None:
        """Start to read a layer, unless one is being read."""
        if index is None or self._ahead is not None:
            return
        started = time.perf_counter()
        self._ahead = index, self._stored.started(list(self._names[index].values()))
        self.disk.waited += time.perf_counter() - started

    def _arrived(self, index: int) -> list[mx.array]:
        """Wait for the weights of a layer."""
        if self._ahead is None or self._ahead[0] != index:
            self._ahead = None
            self._start(index)
        assert self._ahead is not None
        arrays, self._ahead = self._ahead[1], None
        started = time.perf_counter()
        self._stored.wait(arrays)
        self.disk.waited += time.perf_counter() - started
        self.disk.read += sum(array.nbytes for array in arrays)
        return arrays

    def numbers(self, path: str, array: mx.array) -> mx.array:
        """Return the parameter at a path of the model, which holds `array`: that array, or one that is read anew."""
        if path not in self._by_path:
            return array
        read = self._stored.lazily([self._by_path[path]])
        self._stored.wait(read)
        return read[0]
