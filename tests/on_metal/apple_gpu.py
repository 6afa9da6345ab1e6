"""mlx's answers on an Apple GPU and on the default device of a Mac, for stand-ins of Metal on other machines.

`declare()` changes mlx.core so that devices, streams, limits and the operations that no GPU has behave as those of mlx
0.32.4 on a Mac with an M3. Arrays are computed on this machine's CPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

GPU = {
    "architecture": "applegpu_g15s",
    "device_name": "Apple M3",
    "max_buffer_length": 2**33,
    "max_recommended_working_set_size": 2**34,
    "memory_size": 3 * 2**33,
    "resource_limit": 499_000,
}
CPU = {"architecture": "arm64", "device_name": "Apple M3"}
# MLX's own limits there, from these numbers (mlx/backend/metal/allocator.cpp).
MEMORY_LIMIT = min(GPU["max_recommended_working_set_size"] * 3 // 2, GPU["memory_size"] * 95 // 100)
# The linear algebra that MLX has for CPUs alone.
_ON_CPUS = ("cholesky", "cholesky_inv", "eig", "eigh", "eigvals", "eigvalsh", "inv", "lu", "lu_factor", "pinv", "qr")
_ON_CPUS += ("solve", "solve_triangular", "svd", "tri_inv")


class Devices:
    """The default device, the limits of wired memory that were set, and the GPU's streams, which are this CPU's."""

    def __init__(self) -> None:
        self.default = mx.Device(mx.gpu, 0)
        self.wired: list[int] = []
        self._of_gpu: list[Any] = []
        self._stream, self._new = mx.stream, {n: getattr(mx, n) for n in _MAKERS if hasattr(mx, n)}
        self._default_stream, self._synchronize = mx.default_stream, mx.synchronize

    def of(self, place: Any) -> mx.Device:
        """Return the device of a device, a type of device, a stream or None, which means the default device."""
        if place is None:
            return self.default
        if isinstance(place, mx.DeviceType):
            return mx.Device(place, 0)
        if isinstance(place, mx.Device):
            return place
        return mx.Device(mx.gpu if any(place is each for each in self._of_gpu) else mx.cpu, 0)

    def make(self, maker: str, place: Any) -> Any:
        """Make a stream by the function of mlx.core that has the name `maker`."""
        made = self._new[maker](mx.Device(mx.cpu))
        if self.of(place) == mx.gpu:
            self._of_gpu.append(made)
        return made

    def info(self, place: Any = None) -> dict[str, str | int]:
        device = self.of(place)
        # As in MLX, a second GPU is described by nothing.
        return {} if device == mx.Device(mx.gpu, 1) else dict(GPU if device == mx.gpu else CPU)

    def default_stream(self, place: Any) -> Any:
        return self._default_stream(mx.cpu)

    def synchronize(self, place: Any = None) -> None:
        on_this_machine = mx.cpu if isinstance(place, mx.Device | mx.DeviceType | None) else place
        self._synchronize(on_this_machine)

    def set_default(self, place: Any) -> None:
        self.default = self.of(place)

    @contextlib.contextmanager
    def stream(self, place: Any) -> Iterator[None]:
        before, self.default = self.default, self.of(place)
        on_this_machine = mx.cpu if isinstance(place, mx.Device | mx.DeviceType) else place
        try:
            with self._stream(on_this_machine):
                yield
        finally:
            self.default = before

    def wire(self, limit: int) -> int:
        if limit > GPU["max_recommended_working_set_size"]:
            too_large = "Setting a wired limit larger than the maximum working set size is not allowed."
            raise ValueError(f"[metal::set_wired_limit] {too_large}")
        self.wired.append(limit)
        return self.wired[-2] if len(self.wired) > 1 else 0

    def on_cpus_alone(self, name: str) -> Callable[..., Any]:
        """Return mx.linalg's function `name`, which refuses to run on the GPU."""
        function = getattr(mx.linalg, name)

        def call(*arguments: Any, stream: Any = None, **options: Any) -> Any:
            if self.of(stream) == mx.gpu:
                words = "This op is not yet supported on the GPU. Explicitly pass a CPU stream to run it."
                raise ValueError(f"[linalg::{name}] {words}")
            return function(*arguments, **options)

        return call


_MAKERS = ("new_stream", "new_thread_local_stream", "new_thread_unsafe_stream")


def declare() -> Devices:
    """Declare an Apple GPU present and the default device. Return the devices, which can be asked afterwards."""
    devices = Devices()
    mx.metal.is_available = lambda: True
    mx.metal.device_info = lambda: devices.info(mx.gpu)
    mx.device_info = devices.info
    mx.device_count = lambda kind: 1
    mx.default_stream = devices.default_stream
    mx.synchronize = devices.synchronize
    mx.set_memory_limit(MEMORY_LIMIT)
    mx.set_cache_limit(MEMORY_LIMIT)
    mx.is_available = lambda device: True
    mx.default_device = lambda: devices.default
    mx.set_default_device = devices.set_default
    mx.stream = devices.stream
    for maker in _MAKERS:
        if hasattr(mx, maker):
            setattr(mx, maker, lambda place=None, maker=maker: devices.make(maker, place))
    mx.set_wired_limit = devices.wire
    for name in _ON_CPUS:
        if hasattr(mx.linalg, name):
            setattr(mx.linalg, name, devices.on_cpus_alone(name))
    return devices
