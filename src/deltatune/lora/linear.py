"""LoRA and DoRA on a linear layer, plain or quantised at any width and mode.

LoRA: Hu et al., https://arxiv.org/abs/2106.09685. DoRA: Liu et al., https://arxiv.org/abs/2402.09353. Names and
shapes as in mlx_lm.tuner: lora_a [in, r], lora_b [r, out], m [out].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from .adapter import Adapter, uniform
from .weights import dense_weight, input_size, is_quantized, with_weight


def with_low_rank(
    base: Callable[[mx.array], mx.array], x: mx.array, a: mx.array, b: mx.array, scale: float
) -> mx.array:
    """base(x) + scale * (x a) b for x [..., in], a [in, r], b [r, out], all of one dtype.

    Two products forward, four backward and no sums beside them: the base's gradient of x passes through the update's
    function, which adds to it as it multiplies. `scale` touches nothing that is wider than r.
    """
    passed, low = _lowered(x, a)
    return _raised(scale, base(passed), low, b)


def _lowered(x: mx.array, a: mx.array) -> list[mx.array]:
    """x itself, and x a."""

    def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        (x, a), (dx, d_low) = primals, cotangents
        return [mx.addmm(dx, d_low, a.T), _over_rows(1.0, x, d_low)]

    function: Any = mx.custom_function(lambda x, a: [x, x @ a])
    function.vjp(backward)
    return function(x, a)


def _raised(scale: float, y: mx.array, low: mx.array, b: mx.array) -> mx.array:
    """y + scale * low b in y's dtype, of which y's gradient is the one that comes."""

    def backward(primals: Any, dy: mx.array, _output: mx.array) -> list[mx.array]:
        _, low, b = primals
        return [dy, _scaled_product(scale, dy, b.T), _over_rows(scale, low, dy)]

    function: Any = mx.custom_function(lambda y, low, b: mx.addmm(y, low, b, alpha=scale))
    function.vjp(backward)
    return function(y, low.astype(y.dtype), b.astype(y.dtype))


def _over_rows(scale: float, left: mx.array, right: mx.array) -> mx.array:
    """scale left^T right, over all leading axes."""
    return _scaled_product(scale, left.reshape(-1, left.shape[-1]).T, right.reshape(-1, right.shape[-1]))


def _scaled_product(scale: float, left: mx.array, right: mx.array) -> mx.array:
    """scale left right; on a GPU in one launch, for launches are what a step of many small products waits for."""
    if scale == 1.0:
        return left @ right
    if backend.device() == "cpu":
        return scale * (left @ right)
    return mx.addmm(_zeros(right.shape[-1], left.dtype), left, right, alpha=scale)


@cache
def _zeros(size: int, dtype: mx.Dtype) -> mx.array:
    # From numbers, not by an operation: every trace that uses it would do that again.
    return mx.array([0.0] * size, dtype)


def factor_dtypes(model: nn.Module) -> dict[str, mx.Dtype]:
    """Path of a factor -> the dtype that its LoRALinear casts it to: on a GPU that of its base, where not fp32."""
    found: dict[str, mx.Dtype] = {}
    for path, module in model.named_modules() if backend.device() != "cpu" else []:
        if type(module) is not LoRALinear:
            continue
        dtype = (module.linear["scales"] if is_quantized(module.linear) else module.linear["weight"]).dtype
        if dtype in (mx.bfloat16, mx.float16):
            found |= {f"{path}.{name}": dtype for name in ("lora_a", "lora_b")}
    return found


class LoRALinear(Adapter):
    """y = linear(x) + scale * dropout(x) A B, for x [..., in]; the update is added in x's dtype."""

    base_name = "linear"
    kind = "lora"

    def __init__(self, linear: nn.Module, rank: int = 8, scale: float = 20.0, dropout: float = 0.0):
        super().__init__(linear, scale, dropout)
        inputs, outputs = input_size(linear), linear["weight"].shape[0]
        self.lora_a = uniform(inputs, (inputs, rank))
        self.lora_b = mx.zeros((rank, outputs))

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    def __call__(self, x: mx.array) -> mx.array:
        return self._added(self.linear, x)

    def _added(self, base: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """base(x) + scale * dropout(x) A B, in base(x)'s dtype; on a GPU the factors are cast to x's.

        A CPU multiplies bf16 and fp16 slowly, so there the products are in fp32.
        """
        a, b = self.lora_a, self.lora_b
        if backend.device() != "cpu":
            a, b = a.astype(x.dtype), b.astype(x.dtype)
        dropped = self.dropout(x)
        if a.dtype != x.dtype:
            y = base(x)
            return y + (self.scale * ((dropped @ a) @ b)).astype(y.dtype)
        if dropped is not x:
            return _raised(self.scale, base(x), dropped @ a, b)
        return with_low_rank(base, x, a, b, self.scale)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        return with_weight(self.linear, self._fused_weight(), nn.Linear, dequantize)

    def _adapted(self) -> mx.array:
        weight = dense_weight(self.linear).astype(mx.float32)
        return weight + (self.scale * self.lora_b.T) @ self.lora_a.T

    def _fused_weight(self) -> mx.array:
        return self._adapted().astype(dense_weight(self.linear).dtype)


class DoRALinear(LoRALinear):
    """y = m / |W + scale (A B)^T| * (x W^T + scale * dropout(x) A B) + bias; norms by row, no gradient through them.

    The norm is expanded, |w|^2 + 2 w.d + |d|^2, so that no matrix of W's size is made in a step.
    """

    kind = "dora"

    def __init__(self, linear: nn.Module, rank: int = 8, scale: float = 20.0, dropout: float = 0.0):
        super().__init__(linear, rank, scale, dropout)
        self.m = mx.linalg.norm(dense_weight(linear).astype(mx.float32), axis=1)
        # Private, so no parameter: m is trained, this stays the norm of the base.
        self._base_norm = self.m

    def __call__(self, x: mx.array) -> mx.array:
        y = self._added(self._without_bias, x)
        y = (self.m / self._adapted_norm()).astype(x.dtype) * y
        return y + self.linear.bias if "bias" in self.linear else y

    def _without_bias(self, x: mx.array) -> mx.array:
        linear = self.linear
        if not is_quantized(linear):
            return x @ linear["weight"].T
        settings = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        return mx.quantized_matmul(x, linear["weight"], linear["scales"], linear.get("biases"), **settings)

    def _adapted_norm(self) -> mx.array:
        a, b = mx.stop_gradient(self.lora_a), self.scale * mx.stop_gradient(self.lora_b)
        cross = (self._without_bias(a.T).astype(mx.float32) * b).sum(axis=0)
        own = (((a.T @ a) @ b) * b).sum(axis=0)
        return mx.sqrt(mx.maximum(self._base_norm**2 + 2 * cross + own, 0))

    def _fused_weight(self) -> mx.array:
        adapted = self._adapted()
        rescaled = (self.m / mx.linalg.norm(adapted, axis=1))[:, None] * adapted
        return rescaled.astype(dense_weight(self.linear).dtype)
