"""Attention of several libraries with the same inputs: deltatune's kernels, MLX's own and PyTorch's backends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

from deltatune.ops.attention.fused_op import attention_fused


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    heads: int
    key_heads: int
    size: int
    value_size: int = 0

    @property
    def values(self) -> int:
        return self.value_size or self.size

    @property
    def operations(self) -> float:
        """Forward and backward, of causal attention: 4 and 10 operations a pair of positions and column."""
        pairs = self.batch * self.heads * self.length**2 / 2
        return pairs * (6 * (self.size + self.values) + 2 * self.size)

    def __str__(self) -> str:
        wide = f"{self.size}" + (f"/{self.values}" if self.values != self.size else "")
        return f"B{self.batch} T{self.length} H{self.heads}/{self.key_heads} D{wide}"


def drawn(size: Size, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    b, t = size.batch, size.length
    shapes = [(b, size.heads, t, size.size), (b, size.key_heads, t, size.size)]
    shapes += [(b, size.key_heads, t, size.values), (b, size.heads, t, size.values)]
    return [draw.standard_normal(shape, dtype=np.float32) for shape in shapes]


class Mlx:
    """An implementation in MLX."""

    def __init__(self, function: Callable[..., mx.array]) -> None:
        self.function = function

    def load(self, arrays: list[np.ndarray], dtype: str = "bfloat16") -> None:
        self.arrays = [mx.array(x).astype(getattr(mx, dtype)) for x in arrays]
        mx.eval(self.arrays)
        self.scale = self.arrays[0].shape[-1] ** -0.5

    def differentiate(self, q: mx.array, k: mx.array, v: mx.array, dy: mx.array) -> list[mx.array]:
        y, gradients = mx.vjp(lambda q, k, v: [self.function(q, k, v, scale=self.scale)], [q, k, v], [dy])
        return [*y, *gradients]

    def once(self) -> list[mx.array]:
        results = self.differentiate(*self.arrays)
        mx.eval(results)
        return results

    def results(self) -> list[np.ndarray]:
        return [np.array(x.astype(mx.float32)) for x in self.once()]

    def time(self, calls: int) -> tuple[float, float]:
        for _ in range(3):
            self.once()
        start = time.perf_counter()
        for _ in range(calls):
            self.once()
        waited = (time.perf_counter() - start) / calls

        # Each call's dq goes into the next one's q, so that none is left out.
        def row(q: mx.array, k: mx.array, v: mx.array, dy: mx.array) -> mx.array:
            for _ in range(calls):
                _, dq, dk, dv = self.differentiate(q, k, v, dy)
                q, k, v = mx.depends([q, k, v], [dq, dk, dv])
            return q[0, 0, 0, 0]

        compiled = mx.compile(row)
        mx.eval(compiled(*self.arrays))
        start = time.perf_counter()
        mx.eval(compiled(*self.arrays))
        return waited, (time.perf_counter() - start) / calls

    def excess(self) -> int:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        results = self.once()
        peak = mx.get_peak_memory() - before
        del results
        return peak

    def release(self) -> None:
        self.arrays = []
        mx.clear_cache()


class Torch:
    """A backend of PyTorch's scaled_dot_product_attention, by its name."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def load(self, arrays: list[np.ndarray], dtype: str = "bfloat16") -> None:
        import torch

        self.arrays = [torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in arrays]
        self.grouped = arrays[0].shape[1] != arrays[1].shape[1]

    def once(self) -> list[Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.detach().requires_grad_() for x in self.arrays[:3])
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return [y.detach(), *torch.autograd.grad(y, [q, k, v], self.arrays[3])]

    def results(self) -> list[np.ndarray]:
        return [x.float().cpu().numpy() for x in self.once()]

    def time(self, calls: int) -> tuple[float, float]:
        import torch

        times = []
        for every in (True, False):
            for _ in range(3):
                self.once()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                self.once()
                if every:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / calls)
        return times[0], times[1]

    def excess(self) -> int:
        import torch

        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = self.once()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del results
        return peak

    def release(self) -> None:
        import torch

        self.arrays = []
        torch.cuda.empty_cache()


def native(q: mx.array, k: mx.array, v: mx.array, *, scale: float) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")


def peers() -> dict[str, Any]:
    """Each implementation by its name."""
    return {
        "ours": Mlx(attention_fused),
        "torch flash": Torch("FLASH_ATTENTION"),
        "torch cuDNN": Torch("CUDNN_ATTENTION"),
        "MLX's own": Mlx(native),
    }


def guarded(what: Callable[[], Any]) -> Any:
    """The result, or the first line of what refused it."""
    try:
        return what()
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0][:90]
