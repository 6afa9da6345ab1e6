"""One linear per expert, with what it is stored as and its low-rank adapter, applied to rows that know their expert.

Rows come as tiles [t, m, in], each tile with one expert. They meet a matrix in `product` alone, but for `gather_qmm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ...machine import backend
from ..quantized_product import unpacked
from . import grouped, product_trial
from .single_rows import single_rows
from .tiles import Chunk


@dataclass(frozen=True)
class Projection:
    """W [E, out, in] (packed where `scales` is given), bias [E, out], A [E, r, in] and B [E, out, r].

    y = W x + bias + scale * B A dropped(x), where `dropout` leaves out inputs of the adapter, drawn from `key`.
    `trains` names the arrays that get gradients.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    global_scale: mx.array | None = None
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"
    bias: mx.array | None = None
    lora_a: mx.array | None = None
    lora_b: mx.array | None = None
    scale: float | mx.array = 1.0
    dropout: float = 0.0
    key: mx.array | None = None
    trains: tuple[str, ...] = ()

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    @property
    def inputs(self) -> int:
        """Columns of the weight before packing."""
        return self.weight.shape[2] if self.scales is None else self.scales.shape[2] * self.group_size

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the arrays that a call computes or differentiates; the others are frozen parameters."""
        return (*self.trains, "key") if self.dropout else self.trains

    def arrays(self) -> list[mx.array]:
        """The arrays that `given` names."""
        return [getattr(self, name) for name in self.given]

    def around(self, *arrays: mx.array | None) -> Projection:
        """The same projection around other values of `arrays()`."""
        named: dict[str, Any] = dict(zip(self.given, arrays, strict=True))
        return replace(self, **named)

    def without_arrays(self) -> Projection:
        """Without what `given` names; its scale as an array that all calls share, for numbers are buffers each."""
        scale = self.scale if isinstance(self.scale, mx.array) else grouped.number(self.scale)
        return replace(self.around(*[None] * len(self.given)), scale=scale)

    def gathers_whole_weights(self) -> bool:
        """Whether each tile has to copy its expert's matrix: packed or half-precision weights on a CPU."""
        return backend.device() == "cpu" and (self.scales is not None or self.weight.dtype != mx.float32)

    def unpacks_all(self) -> bool:
        """Whether products unpack every expert first: MLX's gather_qmm on CUDA reads a whole matrix for each row."""
        return backend.device() == "cuda" and self.scales is not None

    def dropped(self, rows: mx.array, part: int) -> mx.array:
        """The adapter's input, in the dtype of its products; `part` numbers the draw: the backward pass draws alike."""
        inputs = rows.astype(self._adapter_dtype(rows.dtype))
        if not self.dropout:
            return inputs
        return (inputs * self._mask(rows.shape, part)).astype(inputs.dtype)

    def narrowed(self, dtype: mx.Dtype) -> Projection:
        """With its factors in the dtype of the adapter's products on rows of `dtype`: cast once for all chunks."""
        if self.lora_a is None or self.lora_b is None:
            return self
        kind = self._adapter_dtype(dtype)
        return replace(self, lora_a=self.lora_a.astype(kind), lora_b=self.lora_b.astype(kind))

    def _adapter_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """fp32, but for rows of `dtype` that tensor cores multiply with factors of their own type."""
        assert self.lora_a is not None
        return dtype if grouped.takes(dtype, *self.lora_a.shape[1:], self.outputs) else mx.float32

    def _mask(self, shape: tuple[int, ...], part: int) -> mx.array:
        assert self.key is not None
        key = mx.random.split(self.key, part + 1)[part]
        keep = 1 - self.dropout
        return mx.random.bernoulli(keep, shape, key=key) * (1 / keep)

    def dense(self, experts: mx.array) -> mx.array | None:
        """For `forward` and `backward`, where products need them: the tiles' own matrices in fp32 [t, out, in], or,
        if `unpacks_all`, all experts' [E, out, in]."""
        if self.gathers_whole_weights():
            return self._unpacked(lambda array: array[experts]).astype(mx.float32)
        return self._unpacked(lambda array: array) if self.unpacks_all() else None

    def forward(self, rows: mx.array, chunk: Chunk, dense: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """y [t, m, out], and A dropped(x) [t, m, r] for the backward pass."""
        y = self._base(rows, chunk, dense, True)
        if self.bias is not None:
            y = y + self.bias[chunk.experts][:, None].astype(y.dtype)
        if self.lora_a is None or self.lora_b is None:
            return y, None
        low = self.low(rows, chunk)
        return product(low, self.lora_b, chunk, True, self.scale, y), low

    def low(self, rows: mx.array, chunk: Chunk) -> mx.array:
        """A dropped(x) [t, m, r]."""
        assert self.lora_a is not None
        return product(self.dropped(rows, chunk.number), self.lora_a, chunk, True)

    def backward(self, dy: mx.array, chunk: Chunk, dense: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """dx [t, m, in], and scale * B^T dy [t, m, r], the gradient of A dropped(x)."""
        dx = self._base(dy, chunk, dense, False)
        if self.lora_a is None or self.lora_b is None:
            return dx, None
        dlow = product(dy.astype(self._adapter_dtype(dy.dtype)), self.lora_b, chunk, False, self.scale)
        if not self.dropout:
            return product(dlow, self.lora_a, chunk, False, onto=dx), dlow
        update = product(dlow, self.lora_a, chunk, False)
        update = update * self._mask(update.shape, chunk.number)
        return dx + update.astype(dx.dtype), dlow

    def _base(self, rows: mx.array, chunk: Chunk, dense: mx.array | None, transpose: bool) -> mx.array:
        if self.gathers_whole_weights():
            assert dense is not None
            return rows @ (dense.swapaxes(-1, -2) if transpose else dense)
        if self.scales is None or dense is not None:
            return product(rows, self.weight if dense is None else dense, chunk, transpose)
        more: dict[str, Any] = {} if self.global_scale is None else {"global_scale": self.global_scale}
        return mx.gather_qmm(
            rows,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=chunk.experts,
            transpose=transpose,
            sorted_indices=True,
            **self._packing(),
            **more,
        )

    def _packing(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def _unpacked(self, chosen: Callable[[mx.array], mx.array]) -> mx.array:
        """The matrices that `chosen` picks of [E, ...], unpacked, in the dtype that they are stored for."""
        if self.scales is None:
            return chosen(self.weight)
        biases, wide = (None if each is None else chosen(each) for each in (self.biases, self.global_scale))
        # bf16, which MLX takes for granted, would round the product with the one scale more.
        dtype = None if wide is None else mx.float32
        return unpacked(chosen(self.weight), chosen(self.scales), biases, wide, dtype=dtype, **self._packing())


def product(
    rows: mx.array,
    weight: mx.array,
    chunk: Chunk,
    transpose: bool,
    scale: mx.array | float | None = None,
    onto: mx.array | None = None,
) -> mx.array:
    """onto + scale * rows [t, m, K] times the matrix of each tile's expert, as if of the rows' dtype.

    `weight` is [E, N, K], transposed, or [E, K, N]. In the dtype of `onto`, where there is one.
    """
    weight = weight.astype(rows.dtype)
    alike = onto is None or onto.dtype == rows.dtype
    if chunk.ends is not None and alike and product_trial.on_product(rows, weight, transpose, onto is not None):
        last = None if onto is None else onto.squeeze(1)
        factor = 1.0 if scale is None else scale
        y = grouped.product(rows.squeeze(1), weight, chunk.ends, transpose, factor, last)
        return y.reshape(-1, 1, y.shape[-1])
    if chunk.ends is not None:
        rows = single_rows(rows)
    if backend.device() == "cuda":
        # MLX's products take each expert's matrix to begin where the one before ends: halves of a larger one do not.
        weight = mx.contiguous(weight)
    right = weight.swapaxes(-1, -2) if transpose else weight
    y = mx.gather_mm(rows, right, rhs_indices=chunk.experts, sorted_indices=True)
    y = y if scale is None else scale * y
    return y if onto is None else onto + y.astype(onto.dtype)
