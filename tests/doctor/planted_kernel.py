"""A model of mlx-lm with a custom kernel in its first layer, which the sweep's process imports by this file's name."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3
from mlx_lm.models.qwen3 import ModelArgs


class Sparse(nn.Module):
    """An attention block after a kernel that has no gradient on any machine."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, *more: Any) -> mx.array:
        kernel = mx.fast.metal_kernel(name="sparse_attention", input_names=["x"], output_names=["y"], source="")
        (y,) = kernel(
            inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(1, 1, 1), threadgroup=(1, 1, 1)
        )
        return self.inner(y, *more)


class Model(qwen3.Model):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        layer = self.model.layers[0]
        layer.self_attn = Sparse(layer.self_attn)
