"""Lists the implementations of the gated delta rule that are measured, and the devices on which each runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sizes import Size

# Tokens up to which a loop over chunks is compiled.
UNROLLED = 4096


@dataclass(frozen=True)
class Entry:
    """An implementation to measure, which `make` returns in its own process: its machines, its kinds of gates.

    A slow one is a loop over tokens, and is measured fewer times. `needs` are the modules without which it cannot run.
    """

    name: str
    make: Callable[[], Any]
    machines: tuple[str, ...] = ("cpu", "gpu")
    gates: tuple[str, ...] = ("scalar",)
    slow: bool = False
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The modules that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def takes(self, size: Size) -> bool:
        return ("per channel" if size.per_channel else "scalar") in self.gates


def deltatune_fused() -> Any:
    """gated_delta as a layer calls it, with the check before its first use; a check that fails raises an error."""
    from with_mlx import MLX

    os.environ["DELTATUNE_GATED_DELTA"] = "fused"
    from deltatune import gated_delta

    return MLX(lambda *a: gated_delta(*a)[0])


def deltatune_chunk() -> Any:
    from deltatune.ops.gated_delta import gated_delta_chunk
    from with_mlx import MLX

    return MLX(lambda *a: gated_delta_chunk(*a)[0], UNROLLED)


def mlx_native() -> Any:
    from deltatune.ops.gated_delta.native import gated_delta_native
    from with_mlx import MLX

    return MLX(lambda *a: gated_delta_native(*a)[0])


def mlx_autodiff() -> Any:
    from autodiff import gated_delta_autodiff
    from with_mlx import MLX

    return MLX(gated_delta_autodiff, UNROLLED)


def mlx_lm_loop() -> Any:
    import mlx.core as mx
    from mlx_lm.models.gated_delta import gated_delta_ops

    from with_mlx import MLX

    function = lambda q, k, v, log_g, beta: gated_delta_ops(q, k, v, mx.exp(log_g), beta)[0]  # noqa: E731
    return MLX(function, 0)


def mlx_vlm_chunked() -> Any:
    import mlx.core as mx
    from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_chunked

    from with_mlx import MLX

    def function(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array) -> mx.array:
        state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[3]))
        return gated_delta_chunked(q, k, v, mx.exp(log_g), beta, state)[0]

    return MLX(function, UNROLLED)


def transformers_chunk(threads: int | None = None) -> Any:
    from with_torch import TransformersChunk

    return TransformersChunk(threads)


def flash_linear_attention(per_channel: bool = False) -> Any:
    from with_torch import FlashLinearAttention

    return FlashLinearAttention(per_channel)


def flash_qla() -> Any:
    from with_torch import FlashQLA

    return FlashQLA()


def cudnn() -> Any:
    from with_torch import CuDNN

    return CuDNN()


_CPU, _GPU, _BOTH = ("cpu",), ("gpu",), ("scalar", "per channel")
_CHANNEL, _TRANSFORMERS, _FLA = ("per channel",), ("torch", "transformers"), ("torch", "fla")
ENTRIES = [
    Entry("deltatune fused", deltatune_fused, _GPU, gates=_BOTH),
    Entry("FlashQLA", flash_qla, _GPU, needs=("torch", "tilelang", "flash_qla")),
    Entry("FLA Triton", flash_linear_attention, _GPU, needs=_FLA),
    Entry("FLA Triton, per channel", lambda: flash_linear_attention(True), _GPU, _CHANNEL, needs=_FLA),
    Entry("cuDNN, per channel", cudnn, _GPU, _CHANNEL, needs=("torch", "cudnn")),
    Entry("arrays with autodiff", mlx_autodiff),
    Entry("mlx-lm loop", mlx_lm_loop, gates=_BOTH, slow=True, needs=("mlx_lm",)),
    Entry("deltatune chunk", deltatune_chunk, gates=_BOTH),
    Entry("transformers chunk (torch)", transformers_chunk, needs=_TRANSFORMERS),
    Entry("transformers chunk (torch), one thread", lambda: transformers_chunk(1), _CPU, needs=_TRANSFORMERS),
    Entry("mlx-vlm chunked scan", mlx_vlm_chunked, needs=("mlx_vlm",)),
    Entry("MLX's own operator", mlx_native, _GPU, slow=True),
]


def on(machine: str) -> dict[str, Entry]:
    """The implementations that run on `cpu` or `gpu`, by name, in the order in which they are measured."""
    return {entry.name: entry for entry in ENTRIES if machine in entry.machines}
