"""Chooses by time between MLX's product with a quantised matrix and one that unpacks the matrix first: on Metal.

MLX's product there unpacks each tile of the matrix once for every 32 rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ...machine import backend
from .. import IMPLEMENTATIONS
from ..functional import is_floating
from ..operator import candidates
from ..operator.case import Case
from ..operator.measure import ROUNDING, random_arrays
from ..operator.operator import Candidate, Operator
from .quantized_product import SLAB_BYTES, Quantization, packed_product

# The fewest rows, inputs and outputs for which a time is worth taking, and the most that are timed.
_FEWEST = 512
_MOST = 2048
# The largest error in fp32, of sums over _MOST products.
_BOUND = 1e-5


@dataclass(frozen=True)
class PackedProduct:
    """A class of products of rows with a quantised matrix [outputs, inputs], which share their times.

    The numbers are those of a product, down to a power of two that is _MOST at most.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: str
    quantization: Quantization

    @property
    def words(self) -> str:
        """The class, in words that are the same on every machine."""
        bits, mode = self.quantization.bits, self.quantization.mode
        return f"{self.dtype}, {self.rows:,} rows or more, {self.outputs} x {self.inputs} in {bits} bits ({mode})"


def unpacking_is_faster(x: mx.array, w: mx.array, quantization: Quantization) -> bool:
    """Whether `packed_product` takes the place of MLX's product by its time, on a device that compares times.

    x are the rows, [..., inputs]. The unpacked matrix w has to fit into one slab.
    """
    if not backend.compares_times() or w.ndim != 2 or not is_floating(x) or not quantization.transpose:
        return False
    sizes = math.prod(x.shape[:-1]), w.shape[0], x.shape[-1]
    if not quantization.bits or min(sizes) < _FEWEST or w.shape[0] * x.shape[-1] * x.itemsize > SLAB_BYTES["metal"]:
        return False
    rows, outputs, inputs = (min(_MOST, 1 << size.bit_length() - 1) for size in sizes)
    call = PackedProduct(rows, outputs, inputs, str(x.dtype).removeprefix("mlx.core."), quantization)
    return candidates.choose(OPERATOR, call)[0] == "unpacked"


def _product_of_mlx(x: mx.array, arrays: Any, quantization: Quantization) -> mx.array:
    # With a stream, the patch of this function leaves the call alone.
    return mx.quantized_matmul(x, *arrays, **quantization._asdict(), stream=mx.default_stream(mx.default_device()))


def _unpacked_first(x: mx.array, arrays: list[mx.array], quantization: Quantization) -> mx.array:
    w, scales, *biases = arrays
    return packed_product(x, w, scales, biases[0] if biases else None, quantization)


def trial_case(shape: PackedProduct) -> Case[Any]:
    """Return the case of a class of products: rows and their gradient against fp32 on the CPU."""
    sizes = (shape.outputs, shape.inputs), (shape.rows, shape.inputs), (shape.rows, shape.outputs)
    matrix, x, dy = random_arrays([(size, getattr(mx, shape.dtype)) for size in sizes])
    packed: Any = list(mx.quantize(matrix, **shape.quantization.storage))

    def call(product: Any) -> list[mx.array]:
        results, gradients = mx.vjp(lambda x: [product(x, packed, shape.quantization)], [x], [dy])
        return [*results, *gradients]

    def truth() -> list[mx.array]:
        with mx.stream(mx.cpu):
            numbers = mx.dequantize(*packed, **shape.quantization.storage).astype(mx.float32)
            return [x.astype(mx.float32) @ numbers.T, dy.astype(mx.float32) @ numbers]

    # The numbers of the matrix are rounded, and the results.
    bound = _BOUND + 2 * ROUNDING[shape.dtype]
    return Case(shape.words, ("y", "dx"), call, truth, bound, reference="fp32", like=[x, dy])


def _candidate(function: Any, shape: PackedProduct) -> Candidate:
    return Candidate(function, shape, function, trusted=function is _product_of_mlx)


OPERATOR = Operator(
    name="quantized_product",
    implementations=IMPLEMENTATIONS["quantized_product"],
    orders={"metal": ("packed", "unpacked"), "cpu": ("packed",)},
    candidates={"packed": partial(_candidate, _product_of_mlx), "unpacked": partial(_candidate, _unpacked_first)},
    case_of=trial_case,
    timed_case_of=trial_case,
    examples=tuple,
    compare_last=list,
    workloads=lambda quick: (),
)
