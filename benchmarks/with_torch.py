"""Loads, calls and measures an implementation in PyTorch, on a GPU where there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from sizes import FLOATS, Inputs


class Torch:
    """An implementation in PyTorch; `make` returns f(q, k, v, log_g, beta) -> y."""

    peak = None
    # Whether a call launches so many kernels that recording it as a graph is worth the time.
    graph = False

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or int(os.environ.get("DELTATUNE_THREADS") or os.cpu_count() or 1)

    def make(self) -> Callable[..., Any]:
        raise NotImplementedError

    def load(self, given: Inputs, dtype: str = "float32") -> None:
        import torch

        torch.set_num_threads(self.threads)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.function = self.make()
        kind = getattr(torch, dtype)

        def loaded(x: np.ndarray, name: str, kind: Any) -> Any:
            tensor = self.prepared(name, torch.tensor(x, device=self.device), kind)
            return tensor if given.times == (1, 1) else tensor.repeat(*given.times, *(1,) * (x.ndim - 2))

        self.arrays = [loaded(given.arrays[name], name, torch.float32 if name == "log_g" else kind) for name in FLOATS]
        self.dy = loaded(given.dy, "dy", kind)

    def prepared(self, name: str, tensor: Any, kind: Any) -> Any:
        return tensor.to(kind)

    @staticmethod
    def numpy(tensor: Any) -> np.ndarray:
        return tensor.detach().float().cpu().numpy()

    def forward(self) -> Any:
        import torch

        with torch.no_grad():
            y = self.function(*self.arrays)
        self.wait()
        return y

    def backward(self) -> Any:
        arrays = [x.detach().requires_grad_() for x in self.arrays]
        self.function(*arrays).backward(self.dy)
        return self.scaled([x.grad for x in arrays])

    def both(self) -> list[Any]:
        """y and the gradients, computed, from a given dy as the layer above would pass it."""
        results = self._both()
        self.wait()
        return [results[0], *self.scaled(results[1:])]

    def scaled(self, gradients: list[Any]) -> list[Any]:
        """The gradients with respect to the arguments that load was given."""
        return gradients

    def wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def in_a_row(self, calls: int) -> tuple[float, str]:
        """The seconds of a call among calls that do not wait for one another, and how these were made."""
        step, how = self._both, "calls enqueued"
        if self.graph and self.device == "cuda":
            step, how = self._recorded()
        for _ in range(2):
            step()
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        self.wait()
        return (time.perf_counter() - start) / calls, f"{calls} {how}"

    def excess(self) -> dict[str, int]:
        """Bytes of the inputs with dy, of the gradients, and of the peak of one call beyond both."""
        import torch

        inputs = sum(x.nbytes for x in [*self.arrays, self.dy])
        if self.device == "cpu":
            return {"inputs": inputs, "gradients": inputs - self.dy.nbytes, "excess": 0}
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = self._both()
        self.wait()
        gradients = sum(x.nbytes for x in results[1:])
        peak = torch.cuda.max_memory_allocated()
        return {"inputs": inputs, "gradients": gradients, "excess": peak - before - gradients}

    def release(self) -> None:
        import torch

        self.arrays, self.dy, self.kept = [], None, None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def poison() -> None:
        """Fill memory with NaN and free it, so that the next arrays hold NaN wherever nothing is written."""
        import torch

        if torch.cuda.is_available():
            held = [torch.full((2**power,), float("nan"), device="cuda") for power in range(8, 25) for _ in range(2)]
            torch.cuda.synchronize()
            del held

    def _both(self) -> list[Any]:
        import torch

        arrays = [x.detach().requires_grad_() for x in self.arrays]
        y = self.function(*arrays)
        return [y.detach(), *torch.autograd.grad(y, arrays, self.dy)]

    def _recorded(self) -> tuple[Callable[[], Any], str]:
        """One call recorded as a CUDA graph, or the call itself where PyTorch cannot record it."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._both()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.kept = self._both()
        except (RuntimeError, AssertionError) as error:
            return self._both, f"calls enqueued (no graph: {str(error).splitlines()[0]})"
        return graph.replay, "replays of a CUDA graph"


class ScalesItself(Torch):
    """An implementation that scales q by 1 / sqrt(D) itself, so that q goes there unscaled."""

    def prepared(self, name: str, tensor: Any, kind: Any) -> Any:
        return (tensor * tensor.shape[-1] ** 0.5 if name == "q" else tensor).to(kind)

    def scaled(self, gradients: list[Any]) -> list[Any]:
        return [gradients[0] * gradients[0].shape[-1] ** 0.5, *gradients[1:]]


class TransformersChunk(ScalesItself):
    """transformers' own chunk form. Its q is in fp32, so as not to be rounded twice."""

    def make(self) -> Callable[..., Any]:
        import inspect

        from transformers.models.qwen3_5 import modeling_qwen3_5

        # The name may be bound to somebody else's kernels, where they are installed.
        function = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
        return lambda *arrays: function(*arrays)[0]

    def prepared(self, name: str, tensor: Any, kind: Any) -> Any:
        return super().prepared(name, tensor, tensor.dtype if name == "q" else kind)


class FlashLinearAttention(Torch):
    """flash-linear-attention's Triton kernels."""

    graph = True

    def __init__(self, per_channel: bool = False) -> None:
        super().__init__()
        self.per_channel = per_channel
        # Where FlashQLA or TileLang is installed, FLA hands calls to it unasked.
        os.environ |= {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}

    def make(self) -> Callable[..., Any]:
        if self.per_channel:
            from fla.ops.kda import chunk_kda as function
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
        return lambda q, k, v, g, beta: function(q, k, v, g, beta, scale=1.0)[0]

    def times_only(self) -> str | None:
        """Let the backward pass run where FLA refuses it for wrong results; returns why only its time counts."""
        from fla.ops.common import chunk_o

        flags = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
        hopper, from_3_4, mended = (getattr(chunk_o, name, False) for name in flags)
        if self.per_channel or not (hopper and from_3_4 and not mended):
            return None
        chunk_o.TRITON_ABOVE_3_7_1 = True
        return "only timed: FLA refuses this backward pass here (Hopper, Triton 3.4 to 3.7.0) for wrong results"


class FlashQLA(Torch):
    """FlashQLA's TileLang kernels, for heads of 128 in bf16. They are compiled once for each number of heads."""

    graph = True

    def make(self) -> Callable[..., Any]:
        from flash_qla import chunk_gated_delta_rule as function

        return lambda q, k, v, g, beta: function(q, k, v, g, beta, scale=1.0)[0]


class CuDNN(ScalesItself):
    """The kernels for gates per channel of NVIDIA's cudnn-frontend, for heads of 128 in bf16.

    Its backward pass on Hopper takes gates and betas in fp32, as many key heads as value heads, and no other scale than
    1 / sqrt(D). An engine that is named is used or refused with its reason; else another one would take the call.
    """

    graph = True
    engine = "kda_hopper_cuda"

    def make(self) -> Callable[..., Any]:
        from cudnn.linear_attention.ops import kimi_delta_attention

        def function(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            rows, tokens = q.shape[:2]
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
            flat = [x.flatten(0, 1) for x in (q, k, v, g, beta.float())]
            y = kimi_delta_attention(*flat, self._bounds(rows, tokens), plan_name=self.engine)
            return (y[0] if isinstance(y, tuple) else y).unflatten(0, (rows, tokens))

        return function

    @cache  # noqa: B019  (a process measures one implementation)
    def _bounds(self, rows: int, tokens: int) -> Any:
        import torch

        return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=self.device)
