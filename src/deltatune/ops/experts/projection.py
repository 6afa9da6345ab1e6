"""One of the expert block's projections (gate, up or down): a matrix per expert, quantised or not, and its adapter.

Rows come as tiles [t, m, in] of one expert each. All their products with matrices are made in `product`, except those
with quantised matrices on Metal (`mx.gather_qmm`) and those with the matrices that a CPU copies for each tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ...machine import backend
from ..products.quantized_product import unpacked
from . import grouped, trial_case
from .grouped_hopper import GroupedProduct, Packed
from .tiles import Chunk, needs_whole_matrices, single_rows


@dataclass(frozen=True)
class Projection:
    """The arrays of a linear layer per expert: y = W x + bias + scale * B A dropout(x).

    Args:
        weight: W [E, out, in], or packed [E, out, packed in] where `scales` is given.
        scales: The scales of the quantised weight.
        biases: The quantisation's biases, for mode "affine".
        global_scale: [E], for quantised weights that have one per expert.
        group_size: The quantisation's group size.
        bits: The quantisation's bits.
        mode: The quantisation's mode, as in mx.quantize.
        bias: [E, out].
        lora_a: A [E, r, in].
        lora_b: B [E, out, r].
        scale: The factor of the adapter's update.
        dropout: The share of the adapter's inputs to set to zero.
        key: The random key from which dropout draws.
        trains: The names of the arrays that get gradients.
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
        """The number of inputs, which a packed weight's shape does not show."""
        return self.weight.shape[2] if self.scales is None else self.scales.shape[2] * self.group_size

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the arrays that the block's function takes as arguments; the others are frozen parameters."""
        return (*self.trains, "key") if self.dropout else self.trains

    def arguments(self) -> list[mx.array]:
        """The arrays that `argument_names` names."""
        return [getattr(self, name) for name in self.argument_names]

    def with_arguments(self, *arrays: mx.array | None) -> Projection:
        """Return the same projection with other arrays in the place of `arguments()`."""
        named: dict[str, Any] = dict(zip(self.argument_names, arrays, strict=True))
        return replace(self, **named)

    def without_arrays(self) -> Projection:
        """Return the projection without its `arguments()`, and with its scale as an array that all calls share."""
        scale = self.scale if isinstance(self.scale, mx.array) else grouped.number(self.scale)
        return replace(self.with_arguments(*[None] * len(self.argument_names)), scale=scale)

    def copies_matrix_per_tile(self) -> bool:
        """Whether each tile needs an fp32 copy of its expert's matrix: a CPU with a packed or half-precision weight."""
        return backend.computes_in_fp32() and (self.scales is not None or self.weight.dtype != mx.float32)

    def unpacks_all_experts(self) -> bool:
        """Whether all experts are unpacked first, because gather_qmm reads a whole matrix for each row on CUDA."""
        return backend.device() == "cuda" and self.scales is not None

    def adapter_input(self, rows: mx.array, chunk_number: int) -> mx.array:
        """Return dropout(rows) in the dtype of the adapter's products; a chunk draws the same mask in both passes."""
        inputs = rows.astype(self._adapter_dtype(rows.dtype))
        if not self.dropout:
            return inputs
        return (inputs * self._mask(rows.shape, chunk_number)).astype(inputs.dtype)

    def with_factors_for(self, dtype: mx.Dtype) -> Projection:
        """Return the projection with its factors cast, once for all chunks, for products with rows of `dtype`."""
        if self.lora_a is None or self.lora_b is None:
            return self
        factor_dtype = self._adapter_dtype(dtype)
        return replace(self, lora_a=self.lora_a.astype(factor_dtype), lora_b=self.lora_b.astype(factor_dtype))

    def _adapter_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """The dtype of the adapter's products: that of the rows where tensor cores compute them, and fp32 elsewhere."""
        assert self.lora_a is not None
        return dtype if grouped.supports(dtype, *self.lora_a.shape[1:], self.outputs) else mx.float32

    def _mask(self, shape: tuple[int, ...], chunk_number: int) -> mx.array:
        assert self.key is not None
        key = mx.random.split(self.key, chunk_number + 1)[chunk_number]
        keep = 1 - self.dropout
        return mx.random.bernoulli(keep, shape, key=key) * (1 / keep)

    def unpacked_matrices(self, experts: mx.array, dtype: mx.Dtype) -> mx.array | None:
        """Return the matrices that products with rows of `dtype` need besides the weight as it is stored, or None.

        They are those of the tiles' experts [t] in fp32, [t, out, in], or all experts' [E, out, in] where
        `unpacks_all_experts`; those too are unpacked no sooner than `experts` exists.
        """
        if self.copies_matrix_per_tile():
            return self._unpacked(lambda array: array[experts]).astype(mx.float32)
        # mx.compile computes equal things once: without the tie, all matrices would wait for the backward pass.
        unpacks = self.unpacks_all_experts() and self._packed(experts.size, dtype) is None
        return self._unpacked(lambda array: mx.depends([array], [experts])[0]) if unpacks else None

    def _packed(self, rows: int, dtype: mx.Dtype) -> Packed | None:
        """Return the matrices as they are stored, where products with so many rows of `dtype` unpack them."""
        if not self.unpacks_all_experts() or (self.bits, self.mode) != (4, "affine") or self.global_scale is not None:
            return None
        assert self.scales is not None
        assert self.biases is not None
        packed = Packed(self.weight, self.scales, self.biases, self.group_size)
        return packed if trial_case.reads_packed(packed, rows, dtype) else None

    def forward(self, rows: mx.array, low_rank: mx.array | None, chunk: Chunk, matrices: mx.array | None) -> mx.array:
        """Return y [t, m, out], given the result of `low_rank`, or None without an adapter."""
        adapter = None if low_rank is None or self.lora_b is None else (low_rank, self.lora_b)
        y = self._base(rows, chunk, matrices, True, adapter)
        return y if self.bias is None else y + self.bias[chunk.experts][:, None].astype(y.dtype)

    def low_rank(self, rows: mx.array, chunk: Chunk) -> mx.array | None:
        """Return scale * A dropout(x) [t, m, r]; None without an adapter."""
        if self.lora_a is None:
            return None
        return product(self.adapter_input(rows, chunk.number), self.lora_a, chunk, True, self.scale)

    def d_low_rank(self, dy: mx.array, chunk: Chunk) -> mx.array | None:
        """Return the gradient of A dropout(x), which is scale * B^T dy [t, m, r]; None without an adapter."""
        if self.lora_b is None:
            return None
        return product(dy.astype(self._adapter_dtype(dy.dtype)), self.lora_b, chunk, False, self.scale)

    def backward(
        self,
        dy: mx.array,
        d_low_rank: mx.array | None,
        chunk: Chunk,
        matrices: mx.array | None,
        onto: mx.array | None = None,
    ) -> mx.array:
        """Return dx [t, m, in], added to `onto`, from dy and the results of `d_low_rank` and `unpacked_matrices`."""
        factor = self.lora_a
        if d_low_rank is None or factor is None:
            return self._base(dy, chunk, matrices, False, onto=onto)
        if not self.dropout:
            return self._base(dy, chunk, matrices, False, (d_low_rank, factor), onto)
        dx = self._base(dy, chunk, matrices, False, onto=onto)
        update = product(d_low_rank, factor, chunk, False)
        update = update * self._mask(update.shape, chunk.number)
        return dx + update.astype(dx.dtype)

    def _base(
        self,
        rows: mx.array,
        chunk: Chunk,
        matrices: mx.array | None,
        transpose: bool,
        adapter: tuple[mx.array, mx.array] | None = None,
        onto: mx.array | None = None,
    ) -> mx.array:
        """Return onto + rows times the base weight + the product of the adapter's rows and factor, without bias."""
        packed = self._packed(rows.shape[0], rows.dtype) if matrices is None else None
        if (self.scales is None or matrices is not None or packed) and not self.copies_matrix_per_tile():
            weight = packed or (self.weight if matrices is None else matrices)
            return product(rows, weight, chunk, transpose, onto=onto, adapter=adapter)
        y = self._in_mlx(rows, chunk, matrices, transpose)
        y = y if onto is None else onto + y
        return y if adapter is None else product(*adapter, chunk, transpose, onto=y)

    def _in_mlx(self, rows: mx.array, chunk: Chunk, matrices: mx.array | None, transpose: bool) -> mx.array:
        """Return rows times the base weight, of which `matrices` has a copy per tile, or which MLX unpacks itself."""
        if matrices is not None:
            return rows @ (matrices.swapaxes(-1, -2) if transpose else matrices)
        assert self.scales is not None
        more: dict[str, Any] = {} if self.global_scale is None else {"global_scale": self.global_scale}
        return mx.gather_qmm(
            rows,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=chunk.experts,
            transpose=transpose,
            sorted_indices=True,
            **self._quantization(),
            **more,
        )

    def _quantization(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def _unpacked(self, choose: Callable[[mx.array], mx.array]) -> mx.array:
        """Return the matrices that `choose` picks from [E, ...], unpacked."""
        if self.scales is None:
            return choose(self.weight)
        optional = (self.biases, self.global_scale)
        biases, global_scale = (None if array is None else choose(array) for array in optional)
        # MLX's default of bf16 would round the product with the global scale once more.
        dtype = None if global_scale is None else mx.float32
        arrays = choose(self.weight), choose(self.scales), biases, global_scale
        return unpacked(*arrays, dtype=dtype, **self._quantization())


def product(
    rows: mx.array,
    weight: mx.array | Packed,
    chunk: Chunk,
    transpose: bool,
    scale: mx.array | float | None = None,
    onto: mx.array | None = None,
    adapter: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Return onto + scale * rows times the matrix of each tile's expert + the product of an adapter, [t, m, N].

    The rows are [t, m, K], and the weight, which is cast to their dtype if it is not packed, [E, N, K] if `transpose`,
    and else [E, K, N]. The adapter is rows [t, m, r] and a factor [E, N, r] if `transpose`, and else [E, r, N]. The
    result has the dtype of `onto` [t, m, N], or of the rows without it.
    """
    if isinstance(weight, mx.array):
        weight = weight.astype(rows.dtype)
    one_dtype = onto is None or onto.dtype == rows.dtype
    if chunk.ends is not None and one_dtype:
        tile = trial_case.product_tile(rows, weight, transpose, onto is not None, adapter)
        if tile is not None:
            onto_rows, factor = None if onto is None else onto.squeeze(1), 1.0 if scale is None else scale
            factors = None if adapter is None else (adapter[0].squeeze(1), adapter[1])
            operands = GroupedProduct(rows.squeeze(1), weight, chunk.ends, transpose, factor, onto_rows, factors)
            y = grouped.product(operands, tile)()[0]
            return y.reshape(-1, 1, y.shape[-1])
    if adapter is not None:
        return product(*adapter, chunk, transpose, onto=product(rows, weight, chunk, transpose, scale, onto))
    if isinstance(weight, Packed):
        return product(rows, weight.unpacked(), chunk, transpose, scale, onto)
    if chunk.ends is not None:
        rows = single_rows(rows)
    if needs_whole_matrices():
        weight = mx.contiguous(weight)
    right = weight.swapaxes(-1, -2) if transpose else weight
    y = mx.gather_mm(rows, right, rhs_indices=chunk.experts, sorted_indices=True)
    y = y if scale is None else scale * y
    return y if onto is None else onto + y.astype(onto.dtype)
