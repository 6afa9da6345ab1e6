"""Operations of MLX with other results on an Apple GPU than on this machine's CPU.

`declare()` changes mlx.core: experts' products in 16 bits, which MLX's CPU lacks; products with packed matrices, which
the GPU rounds once and the CPU after each addition; and float64, which the GPU refuses.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from apple_gpu import Devices

_NARROW = (mx.bfloat16, mx.float16)
# Where the arguments that are not indices or packed matrices stand.
_PRODUCTS = {"gather_mm": (0, 1), "gather_qmm": (0, 2, 3), "quantized_matmul": (0, 2, 3)}
_NAMES = ("scales", "biases")


def declare(devices: Devices) -> None:
    """Let these operations answer as on the GPU while it is the default device."""
    for name, places in _PRODUCTS.items():
        setattr(mx, name, RoundedOnce(getattr(mx, name), places, devices))
    mx.array.astype = _without_float64(mx.array.astype, devices)


class RoundedOnce:
    """A product of MLX's that adds in fp32 and rounds at the end where its first argument is of 16 bits.

    It states the names of MLX's function, which is compiled and has no others either: the patches look at them.
    """

    def __init__(self, product: Callable[..., mx.array], places: tuple[int, ...], devices: Devices):
        self.__module__, self.__name__, self.__doc__ = product.__module__, product.__name__, product.__doc__
        self._product, self._places, self._devices = product, places, devices

    def __call__(self, *given: Any, **options: Any) -> mx.array:
        if self._devices.default == mx.cpu or given[0].dtype not in _NARROW:
            return self._product(*given, **options)
        wide = [_wide(x) if place in self._places else x for place, x in enumerate(given)]
        options = {name: _wide(x) if name in _NAMES else x for name, x in options.items()}
        return self._product(*wide, **options).astype(given[0].dtype)


def _wide(x: Any) -> Any:
    return x.astype(mx.float32) if isinstance(x, mx.array) and x.dtype in _NARROW else x


def _without_float64(astype: Callable[..., mx.array], devices: Devices) -> Callable[..., mx.array]:
    def call(self: mx.array, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        if dtype == mx.float64 and (devices.default if stream is None else devices.of(stream)) == mx.gpu:
            raise ValueError("float64 is not supported on the GPU")
        return astype(self, dtype)

    return call
