"""Loads, calls and measures an implementation in MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sizes import FLOATS, Inputs


class MLX:
    """An implementation f(q, k, v, log_g, beta) -> y in MLX.

    compiled_to: calls in a row are compiled up to this many tokens; a longer unrolled loop takes minutes to compile.
    """

    def __init__(self, function: Callable[..., Any], compiled_to: float = float("inf")) -> None:
        self.function, self.compiled_to = function, compiled_to

    def load(self, given: Inputs, dtype: str = "float32") -> None:
        import mlx.core as mx

        kind = getattr(mx, dtype)

        def loaded(x: np.ndarray, kind: Any) -> Any:
            array = mx.array(x).astype(kind)
            return array if given.times == (1, 1) else mx.tile(array, (*given.times, *(1,) * (x.ndim - 2)))

        self.arrays = [loaded(given.arrays[name], mx.float32 if name == "log_g" else kind) for name in FLOATS]
        self.dy = loaded(given.dy, kind)
        mx.eval(self.arrays, self.dy)
        loss = lambda *a: (self.function(*a) * self.dy).sum()  # noqa: E731
        self.gradient = mx.grad(loss, argnums=list(range(len(FLOATS))))
        self.held = mx.get_active_memory()

    @staticmethod
    def numpy(array: Any) -> np.ndarray:
        import mlx.core as mx

        return np.array(array.astype(mx.float32))

    def forward(self) -> Any:
        import mlx.core as mx

        y = self.function(*self.arrays)
        mx.eval(y)
        return y

    def backward(self) -> Any:
        """Compute only the gradients of sum(y * dy); `peak` is in bytes beyond the inputs."""
        import mlx.core as mx

        mx.reset_peak_memory()
        gradients = self.gradient(*self.arrays)
        mx.eval(gradients)
        self.peak = mx.get_peak_memory() - self.held
        return gradients

    def both(self) -> list[Any]:
        """y and the gradients, evaluated, from a given dy as the layer above would pass it."""
        import mlx.core as mx

        results = self._both(self.arrays, self.dy)
        mx.eval(results)
        return results

    def in_a_row(self, calls: int) -> tuple[float, str]:
        """The seconds of a call among calls that do not wait for one another, and how these were made."""
        import time

        import mlx.core as mx

        compiled = self.arrays[0].shape[1] <= self.compiled_to
        step: Callable = mx.compile(self._both) if compiled else self._both
        for _ in range(2):
            mx.eval(step(self.arrays, self.dy))
        mx.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            mx.async_eval(step(self.arrays, self.dy))
        mx.synchronize()
        return (time.perf_counter() - start) / calls, f"{calls} calls enqueued{', compiled' if compiled else ''}"

    def excess(self) -> dict[str, int]:
        """Bytes of the inputs with dy, of the gradients, and of the peak of one call beyond both."""
        import mlx.core as mx

        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        results = self.both()
        mx.synchronize()
        gradients = sum(x.nbytes for x in results[1:])
        inputs = sum(x.nbytes for x in [*self.arrays, self.dy])
        return {"inputs": inputs, "gradients": gradients, "excess": mx.get_peak_memory() - before - gradients}

    def release(self) -> None:
        import mlx.core as mx

        self.arrays, self.dy, self.gradient = [], None, None
        mx.clear_cache()

    @staticmethod
    def poison() -> None:
        """Fill memory with NaN and free it, so that the next arrays hold NaN wherever nothing is written."""
        import mlx.core as mx

        mx.clear_cache()
        mx.eval([mx.full((2**power,), mx.nan) for power in range(8, 25) for _ in range(2)])

    def _both(self, arrays: list[Any], dy: Any) -> list[Any]:
        import mlx.core as mx

        outputs, gradients = mx.vjp(self.function, arrays, [dy])
        return [*outputs, *gradients]
