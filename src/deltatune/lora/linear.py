"""LoRA and DoRA on a linear layer or an embedding, dense or quantised.

LoRA is from Hu et al., https://arxiv.org/abs/2106.09685, and DoRA from Liu et al., https://arxiv.org/abs/2402.09353.
Parameters are named and shaped as in mlx_lm.tuner: lora_a [in, r], lora_b [r, out], m [out]; of an embedding lora_a
[vocabulary, r], lora_b [r, dims], m [vocabulary].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from ..ops.decoding.token_products import Matrix, joined, product
from ..ops.products.low_rank import add_product, both_products, columns_product, rows_product
from ..ops.products.quantized_product import dense_product
from ..ops.recomputation import input_of
from ..ops.tracing import trace
from ..ops.tracing.known import Known
from .adapter import Adapter, norm_of_sum, row_norms, uniform, with_row_norms
from .together import output
from .weights import dense_weight, input_size, is_quantized, quantization


def with_low_rank(
    base: Callable[[mx.array], mx.array], x: mx.array, a: mx.array, b: mx.array, scale: float
) -> mx.array:
    """Compute base(x) + scale * (x a) b with as few operations as possible, forward and backward; x, a and b of one
    dtype.

    The sums are part of products (`add_product`): x [..., in] reaches the base through the function for x a, so that
    its backward pass adds the update's gradient of x to the base's within a product. The scale only ever multiplies
    within a product or arrays that are r wide.
    """
    if x.shape[-2:-1] == (1,):
        # One token a row is a decoder's, for which wrapping two functions takes longer than computing them.
        return mx.addmm(base(x), x @ a, b.astype(a.dtype), alpha=scale)
    x, low_rank = _project_down(x, a)
    return _add_up_projection(scale, base(x), low_rank, b)


def with_update(
    base: Callable[[mx.array], mx.array], x: mx.array, dropped: mx.array, a: mx.array, b: mx.array, scale: float
) -> mx.array:
    """Return base(x) + scale * dropped A B, in the dtype of base(x); `dropped` is x itself or x after dropout.

    A GPU multiplies in x's dtype; a CPU, where bf16 and fp16 are slow, in fp32.
    """
    if not backend.computes_in_fp32():
        a, b = a.astype(x.dtype), b.astype(x.dtype)
    if a.dtype != x.dtype:
        y = base(x)
        return y + (scale * ((dropped @ a) @ b)).astype(y.dtype)
    if dropped is not x:
        return _add_up_projection(scale, base(x), dropped @ a, b)
    return with_low_rank(base, x, a, b, scale)


def _project_down(x: mx.array, a: mx.array) -> list[mx.array]:
    """Return x itself, for the base to read, and x a."""
    remembered_input = input_of(x)

    def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
        x, a = primals
        dx, d_low_rank = cotangents
        (x,) = remembered_input.again([x], [d_low_rank])
        dx = add_product(dx, d_low_rank, a, transpose=True)
        d_a = columns_product(x, d_low_rank)
        return [remembered_input.before(dx, [d_a]), d_a]

    function: Any = mx.custom_function(lambda x, a: [x, rows_product(x, a)])
    function.vjp(backward)
    return function(x, a)


def _add_up_projection(scale: float, y: mx.array, low_rank: mx.array, b: mx.array) -> mx.array:
    """Return y + scale * low_rank b in y's dtype; the gradient of y is the cotangent itself."""

    def backward(primals: Any, dy: mx.array, _output: mx.array) -> list[mx.array]:
        _, low_rank, b = primals
        return [dy, *both_products(dy, low_rank, b, scale)]

    function: Any = mx.custom_function(lambda y, low_rank, b: add_product(y, low_rank, b, scale))
    function.vjp(backward)
    return function(y, low_rank.astype(y.dtype), b.astype(y.dtype))


def token_matrix(layer: nn.Module, dtype: mx.Dtype) -> Matrix | None:
    """Return the matrix of a linear layer, and of its LoRA, for rows of this dtype; None with a bias or dropout.

    Joined matrices are computed while a step is traced, so one that changes between steps has none either.
    """
    base = layer.base if type(layer) is LoRALinear else layer
    factors = trace.current().factors
    if type(base) is not nn.Linear or "bias" in base or (factors is not None and base.trainable_parameters()):
        return None
    if type(layer) is not LoRALinear:
        return Matrix(base.weight)
    if layer.training and layer.dropout_rate:
        return None
    # A rank that is a multiple of 8 has lines of whole loads.
    spare = -layer.lora_a.shape[1] % 8
    a = mx.pad(layer.lora_a.T.astype(dtype), [(0, spare), (0, 0)])
    b = mx.pad((layer.scale * layer.lora_b).T.astype(dtype), [(0, 0), (0, spare)])
    matrix = Matrix(base.weight, mx.contiguous(a), mx.contiguous(b))
    if factors is None:
        # Computed once in a trace, and kept by the compiled step.
        mx.eval(matrix.a, matrix.b)
    return matrix


def token_output(layer: nn.Module, x: mx.array) -> mx.array | None:
    """Apply a linear layer to one token of each row, x [B, 1, in], by its kernel; return None if that cannot serve."""
    matrix = token_matrix(layer, x.dtype) if trace.current().next_tokens else None
    return None if matrix is None else product(x, matrix)


def projected(layers: Sequence[Any], x: mx.array) -> tuple[mx.array, ...]:
    """Apply several linear layers to one token of each row; return one joint array [B, 1, C], or one for each."""
    matrices = [token_matrix(layer, x.dtype) for layer in layers]
    if None not in matrices:
        matrix = joined([matrix for matrix in matrices if matrix is not None])
        y = product(x, matrix)
        if y is None and matrix.a is None:
            y = x @ matrix.weight.T
        if y is not None:
            return (y,)
    return tuple(layer(x) for layer in layers)


def factor_dtypes(model: nn.Module) -> dict[str, mx.Dtype]:
    """Find the factors that a GPU uses in the half precision of their base: the path of each, and that dtype.

    Only LoRALinear casts its factors, and only on a GPU.
    """
    dtypes: dict[str, mx.Dtype] = {}
    for path, module in model.named_modules() if not backend.computes_in_fp32() else []:
        if type(module) is not LoRALinear:
            continue
        dtype = (module.linear["scales"] if is_quantized(module.linear) else module.linear["weight"]).dtype
        if dtype in (mx.bfloat16, mx.float16):
            dtypes |= {f"{path}.{name}": dtype for name in ("lora_a", "lora_b")}
    return dtypes


class _Cast(NamedTuple):
    """Both factors of an adapter in the dtype of its input rows, a [in, r] and b [r, out], kept under its lora_a.

    A GPU multiplies in the dtype of the rows, and the factors are fp32. Casting them for every token would take two
    launches of each adapter, so they are kept while the next calls are of one token, too, and while the adapter holds
    the same arrays. A factor whose numbers change in place, as by `lora_b *= 2`, counts from the next prompt on.
    """

    origin_of_b: weakref.ref[mx.array]
    a: mx.array
    b: mx.array


def _adapted_token(layer: LoRALinear, x: mx.array, known: Known) -> mx.array | None:
    """Return linear(x) + scale * (x A) B for x [..., 1, in]; None on a CPU if the factors have another dtype than x.

    The layer has no active dropout; `known` keeps the cast factors.
    """
    a = layer["lora_a"]
    b = layer["lora_b"]
    dtype = x.dtype
    if a.dtype != dtype or b.dtype != dtype:
        cast = known.of(a, _Cast)
        if cast is None or cast.origin_of_b() is not b or cast.a.dtype != dtype:
            if backend.computes_in_fp32():
                return None
            cast = _cast(a, b, dtype, known)
        _, a, b = cast
    return mx.addmm(layer["linear"](x), x @ a, b, alpha=layer.scale)


def _cast(a: mx.array, b: mx.array, dtype: mx.Dtype, known: Known) -> _Cast:
    cast = _Cast(weakref.ref(b), a.astype(dtype), b.astype(dtype))
    # Arrays that a gradient is taken by, or that a compiled function is given, are others in each call of it.
    known.note(a, cast)
    return cast


class LoRALinear(Adapter):
    """A linear layer with a low-rank update: y = linear(x) + scale * dropout(x) A B, in the dtype of linear(x).

    Its base is an nn.Linear or nn.QuantizedLinear, or a module that holds its arrays under the same names.

    Example:
        >>> layer = LoRALinear.from_base(nn.Linear(64, 32), rank=4)
        >>> layer(mx.zeros((2, 7, 64))).shape
        (2, 7, 32)
    """

    base_name = "linear"
    dense_class = nn.Linear

    def begin(self, rank: int) -> None:
        inputs = input_size(self.linear)
        outputs = self.linear["weight"].shape[0]
        self.lora_a = uniform(inputs, (inputs, rank))
        self.lora_b = mx.zeros((rank, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        y = self._by_itself(x) if type(self) is LoRALinear else None
        return self._with_update(self.linear, x) if y is None else y

    def _by_itself(self, x: mx.array) -> mx.array | None:
        told = trace.current()
        if told.next_tokens:
            return token_output(self, x)
        if x.shape[-2:-1] == (1,) and not told.whole_rows and not (self.training and self.dropout_rate):
            return _adapted_token(self, x, told.known)
        # A call on several tokens, as at a prompt's start.
        told.known.forget(_Cast)
        return output(self, x)

    def _with_update(self, base: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        return with_update(base, x, self.dropout(x), self.lora_a, self.lora_b, self.scale)

    def adapted_weight(self) -> mx.array:
        return dense_weight(self.linear).astype(mx.float32) + (self.scale * self.lora_b.T) @ self.lora_a.T


class DoRALinear(LoRALinear):
    """A linear layer with rows of trained length m in its adapted weight.

    y = m / |W + scale (A B)^T| * (x W^T + scale * dropout(x) A B) + bias, where |.| is the norm of each row. The norm
    is a constant for the gradient, as in section 4.3 of the paper.
    """

    kind = "dora"

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self.m = row_norms(dense_weight(self.linear))
        # The underscore keeps the base's norms out of the parameters, while m is trained.
        self._base_norm = self.m

    def __call__(self, x: mx.array) -> mx.array:
        y = self._with_update(self._without_bias, x)
        y = (self.m / self._adapted_norm()).astype(x.dtype) * y
        return y + self.linear.bias if "bias" in self.linear else y

    def _without_bias(self, x: mx.array) -> mx.array:
        linear = self.linear
        if not is_quantized(linear):
            return dense_product(x, linear["weight"])
        packed = linear["weight"], linear["scales"], linear.get("biases")
        return mx.quantized_matmul(x, *packed, **quantization(linear))

    def _adapted_norm(self) -> mx.array:
        a = mx.stop_gradient(self.lora_a)
        b = self.scale * mx.stop_gradient(self.lora_b)
        inner_product = (self._without_bias(a.T).astype(mx.float32) * b).sum(axis=0)
        return norm_of_sum(self._base_norm, inner_product, (((a.T @ a) @ b) * b).sum(axis=0))

    def adapted_weight(self) -> mx.array:
        return with_row_norms(super().adapted_weight(), self.m)


class LoRAEmbedding(Adapter):
    """An embedding with a low-rank update: embedding(ids) + scale * dropout(A[ids] B), [..., dims] for ids [...].

    Dropout sets values of the update to zero, and in `as_linear` its inputs.
    """

    base_name = "embedding"
    dense_class = nn.Embedding

    def begin(self, rank: int) -> None:
        vocabulary = self.embedding["weight"].shape[0]
        dims = dense_weight(self.embedding).shape[1]
        self.lora_a = uniform(vocabulary, (vocabulary, rank))
        self.lora_b = mx.zeros((rank, dims))

    def __call__(self, ids: mx.array) -> mx.array:
        y = self.embedding(ids)
        return y + (self.scale * self.dropout(self.lora_a[ids] @ self.lora_b)).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits [..., vocabulary] of x [..., dims], for a head that is tied to the embedding."""
        update = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        return self.embedding.as_linear(x) + (self.scale * update).astype(x.dtype)

    def adapted_weight(self) -> mx.array:
        return dense_weight(self.embedding).astype(mx.float32) + (self.scale * self.lora_a) @ self.lora_b


class DoRAEmbedding(LoRAEmbedding):
    """An embedding with adapted rows of trained length m; the norm is a constant for the gradient."""

    kind = "dora"

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self.m = row_norms(dense_weight(self.embedding))
        self._base_norm = self.m

    def __call__(self, ids: mx.array) -> mx.array:
        y = self.embedding(ids)
        update = self.scale * self.lora_a[ids] @ self.lora_b
        norm = mx.stop_gradient(mx.linalg.norm(y.astype(mx.float32) + update, axis=-1))
        y = y + self.dropout(update).astype(y.dtype)
        return (self.m[ids] / norm)[..., None].astype(y.dtype) * y

    def as_linear(self, x: mx.array) -> mx.array:
        return (self.m / self._adapted_norm()).astype(x.dtype) * super().as_linear(x)

    def _adapted_norm(self) -> mx.array:
        a = self.scale * mx.stop_gradient(self.lora_a)
        b = mx.stop_gradient(self.lora_b)
        inner_product = (self.embedding.as_linear(b).astype(mx.float32).T * a).sum(axis=1)
        return norm_of_sum(self._base_norm, inner_product, ((a @ (b @ b.T)) * a).sum(axis=1))

    def adapted_weight(self) -> mx.array:
        return with_row_norms(super().adapted_weight(), self.m)
