"""Replaces the products of linear layers and heads in 16 bits, which a CPU computes thirty times faster in fp32.

The patches are applied on CPUs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...ops.products.quantized_product import narrow_product, serves_narrow
from ..patch_record import Check, Function, Patch
from ..small_cases import describe_difference, drawn

_WIDTH = 64
# A result is rounded to bf16 once, by either half a unit in the last place.
_BOUND = 2.0**-7


def _linear(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if not serves_narrow(x, self["weight"]):
            return upstream(self, x)
        y = narrow_product(x, self["weight"])
        return y + self["bias"] if "bias" in self else y

    return __call__


def _as_linear(upstream: Function) -> Function:
    def as_linear(self: Any, x: mx.array) -> mx.array:
        return narrow_product(x, self["weight"]) if serves_narrow(x, self["weight"]) else upstream(self, x)

    return as_linear


def _same(name: str) -> Check:
    """Build a check that compares a layer's products and their gradients in bf16 with upstream's in fp32."""

    def check(upstream: Function, ours: Function) -> str | None:
        cls = upstream.__globals__[name]
        layer = cls(_WIDTH, _WIDTH)
        x = drawn(1, 3, _WIDTH)

        def results(function: Function, dtype: mx.Dtype) -> list[mx.array]:
            arrays = {key: value.astype(mx.bfloat16).astype(dtype) for key, value in layer.parameters().items()}

            def loss(x: mx.array, arrays: dict[str, mx.array]) -> mx.array:
                layer.update(arrays)
                return function(layer, x).astype(mx.float32).square().sum()

            _, (dx, gradients) = mx.value_and_grad(loss, argnums=(0, 1))(x.astype(dtype), arrays)
            layer.update(arrays)
            return [function(layer, x.astype(dtype)), dx, *gradients.values()]

        return describe_difference(
            results(ours, mx.bfloat16), results(upstream, mx.float32), _BOUND, "the product in fp32"
        )

    return check


_RECORD: dict[str, Any] = {
    "reason": "a CPU computes products in 16 bits thirty times slower than in fp32",
    "without": "Training and answers with weights in 16 bits are then many times slower on this machine.",
}
PATCHES = (
    Patch(
        **_RECORD,
        module="mlx.nn.layers.linear",
        name="Linear.__call__",
        replacement=_linear,
        check=_same("Linear"),
    ),
    Patch(
        **_RECORD,
        module="mlx.nn.layers.embedding",
        name="Embedding.as_linear",
        replacement=_as_linear,
        check=_same("Embedding"),
    ),
)
