"""Computes the experts of a mixture layer, from the router's choice to the weighted sum, with a gradient by hand.

The backward pass recomputes chunks of rows, one after another, from the inputs alone; on an NVIDIA GPU the outputs of
up and gate are saved, unless the layer is checkpointed. A row x of token n with expert e and score s adds y = s f_e(x)
to the token's output. With the cotangent c = dL/dy_n, the hidden row h and the down projection W, b of the expert, the
gradients of h and s are
    dh = s W^T c,  ds = <W^T c, h> + <b, c>,
so that the expert's output need not be recomputed for the gradient of its score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx

from ...machine import backend
from ..functional import is_floating, not_differentiated_again, refuse_second_derivative, with_gradient
from ..pointwise import scored_swiglu, silu
from ..tracing import trace
from ..tracing.turns import blank, turns
from .gradient_sums import GradientSums, WithLowRank
from .projection import Projection
from .readers import InnerRows
from .tiles import Chunk, Sorted, Tiled, scores_of, tile_rows

Activation = Callable[..., mx.array]
_Arrays = Sequence[mx.array]
_NO_SECOND_DERIVATIVE = "expert_block has no second derivative: its backward pass is written by hand."

# How many bytes the fp32 arrays of one chunk of rows may take.
CPU_CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 256 * 2**20
# On Metal each chunk reads all experts, and may take this part of the memory: 35B-A3B has one chunk of 2,048 tokens in
# a Mac of 64 GB, and reads 54 GB a step in place of 162.
_PART_OF_MEMORY = 1 / 64
# The fewest rows of a GPU's chunk per expert: fewer would read each matrix for little work, and fill no tile on CUDA.
ROWS_PER_EXPERT = {"metal": 4, "cuda": 128}

# The cost of a tile on a CPU in addition to its rows, measured in rows: a BLAS call; copying a matrix to fp32;
# unpacking a quantised one; adding the matrix's gradient up.
DENSE_COST = 27
HALF_COST = 60
PACKED_COST = 400
TRAINED_COST = 200


def swiglu(up: mx.array, gate: mx.array) -> mx.array:
    """Return silu(gate) * up, for arrays of one shape and dtype."""
    if silu.serves(gate, up):
        return silu.swiglu(gate, up)
    return gate * mx.sigmoid(gate) * up


def expert_block(
    x: mx.array,
    indices: mx.array,
    scores: mx.array | None,
    up: Projection,
    down: Projection,
    gate: Projection | None = None,
    activation: Activation = swiglu,
) -> mx.array:
    """Compute the sum over k of scores * down(activation(up(x), gate(x))), each with the expert that `indices` names.

    x is [..., D] in fp32, bf16 or fp16; up and gate go from D to I, and down from I to D; the activation is an
    elementwise function without parameters, of one argument without a gate. `indices` [..., k] are integers from 0 to
    E - 1, without gradients. A lazy graph cannot refuse a value, so a token with an index outside this range gets NaN
    as its output and gradient. The result is [..., D], or without scores [..., k] the experts' outputs [..., k, D], in
    the dtype of x * scores. Gradients reach x, the scores, and the arrays that each projection names in `trains`. On a
    CPU all products are in fp32. ValueError where shapes disagree, NotImplementedError for a second derivative.
    """
    _check(x, indices, scores, up, down, gate)
    lead = indices.shape[:-1]
    top_k = indices.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    flat = mx.stop_gradient(indices).reshape(-1, top_k)
    # For an index out of range MLX would write outside its memory; as uint32, a negative index is a large one.
    flat = flat.astype(mx.uint32)
    in_range = flat < _constant(up.experts, mx.uint32)
    flat = flat * in_range
    projections = [up, down] if gate is None else [up, down, gate]
    layout = _layout(projections, *flat.shape)
    block = _Block(projections, activation, layout, scores is not None)
    weights = mx.ones(flat.size, x.dtype) if scores is None else scores.reshape(-1)
    # A slice, because mlx 0.32.0 writes a constant of one element into compiled kernels as text, and "nan" is none.
    weights = mx.where(in_range.reshape(-1), weights, _nan(weights.dtype)[:1])
    routing = layout.sort(flat)
    arrays = [array for projection in projections for array in projection.arguments()]
    y, *_ = block.function(len(routing))(rows, weights, *routing, *arrays)
    return y.reshape(*lead, -1) if scores is not None else y.reshape(*lead, top_k, -1)


@cache
def _constant(value: float, dtype: mx.Dtype) -> mx.array:
    """An array shared by all layers and traces, each of which would otherwise keep a buffer of its own."""
    return mx.array(value, dtype)


@cache
def _nan(dtype: mx.Dtype) -> mx.array:
    return mx.array([math.nan] * 2, dtype)


class _Block:
    """The sizes and frozen weights of one call, with the forward and the backward pass over its chunks.

    It must hold no array that the call computed: a compiled step keeps this object for its gradients, and through such
    an array would keep the whole graph that computed it.
    """

    def __init__(self, projections: list[Projection], activation: Activation, layout: Tiled | Sorted, summed: bool):
        self.projections = [projection.without_arrays() for projection in projections]
        self.activation = activation
        self.layout = layout
        self.summed = summed
        self.in_fp32 = backend.computes_in_fp32()
        # Computing up and gate again would be two of eight products with weights.
        self.keeps = backend.device() == "cuda" and not trace.current().recomputed

    def function(self, num_routing: int) -> Callable[..., list[mx.array]]:
        """Return f(x, scores, *routing, *arguments) -> [y, *saved]: the layout's arrays, then those of projections."""

        def forward(x: mx.array, scores: mx.array, *more: mx.array) -> list[mx.array]:
            return self.forward(x, scores, more[:num_routing], more[num_routing:])

        def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            num_saved = len(outputs) - 1

            def backward(dy: mx.array, *arrays: mx.array) -> list[mx.array]:
                saved = arrays[:num_saved]
                x, scores, *more = arrays[num_saved:]
                return self.backward(dy, x, scores, more[:num_routing], more[num_routing:], saved)

            gradients = not_differentiated_again(backward, refuse_second_derivative(_NO_SECOND_DERIVATIVE))
            dx, dscores, *d_arguments = gradients(cotangents[0], *outputs[1:], *primals)
            return [dx, dscores, *map(mx.zeros_like, primals[2 : 2 + num_routing]), *d_arguments]

        return with_gradient(forward, vjp)

    def forward(self, x: mx.array, scores: mx.array, routing: _Arrays, arguments: _Arrays) -> list[mx.array]:
        """Return y and the saved tensors of the backward pass: of each chunk its order and its `InnerRows`."""
        readers, down = self._with_arguments(arguments, x.dtype)
        layout = self.layout
        result_dtype = mx.result_type(x.dtype, scores.dtype)
        dtype = mx.float32 if self.in_fp32 else result_dtype
        total = mx.zeros((x.shape[0] if self.summed else scores.size, down.outputs), dtype)
        for_backward: list[mx.array] = []
        of_chunk: list[mx.array] = []
        for number, _, left_out in turns(range(layout.chunks + 1)):
            if left_out:
                for_backward += [blank(array, left_out * len(array), [total]) for array in of_chunk]
                continue
            chunk = layout.chunk(routing, number, [total] if number else [])
            matrices = [p.unpacked_matrices(chunk.experts, x.dtype) for p in readers]
            inner = InnerRows.of(readers, self._tiles(x, chunk.token), chunk, matrices)
            hidden = self.activation(*inner.outputs)
            low_rank = down.low_rank(hidden, chunk)
            if self.keeps and isinstance(layout, Sorted):
                of_chunk = [*layout.arrays(chunk), *inner._replace(of_down=low_rank).arrays()]
                for_backward += of_chunk
            y = down.forward(hidden, low_rank, chunk, down.unpacked_matrices(chunk.experts, hidden.dtype))
            if self.summed:
                total = layout.add_to_tokens(total, y, chunk, scores)
            else:
                total = layout.add_to_pairs(total, y * scores_of(scores, chunk).astype(y.dtype), chunk)
        return [total.astype(result_dtype), *for_backward]

    def backward(
        self, dy: mx.array, x: mx.array, scores: mx.array, routing: _Arrays, arguments: _Arrays, saved: _Arrays
    ) -> list[mx.array]:
        readers, down = self._with_arguments(arguments, x.dtype)
        layout = self.layout
        dx = mx.zeros(x.shape, mx.float32 if self.in_fp32 else x.dtype)
        dscores = mx.zeros(scores.size)
        sums = GradientSums(readers, down, layout)
        every = turns(range(layout.chunks + 1))
        of_chunk = len(saved) // len(every)
        remaining = iter(saved)
        left: list[mx.array] = []
        for number, _, left_out in every:
            if left_out:
                left = list(islice(remaining, of_chunk))
                continue
            previous = [dx, dscores, *sums.arrays(), *left] if number else []
            inner = None
            if saved and isinstance(layout, Sorted):
                chunk = layout.again(number, list(islice(remaining, Sorted.num_arrays)), previous)
                inner = InnerRows.again(readers, down, remaining)
            else:
                chunk = layout.chunk(routing, number, previous)
            tiles, dscore = self._backward_chunk(sums, dy, x, scores, chunk, inner)
            dx = layout.add_to_tokens(dx, tiles, chunk)
            dscores = layout.add_to_pairs(dscores, dscore, chunk)
        names = [p.argument_names for p in self.projections]
        d_arguments = [
            by_name.get(name) for by_name, named in zip(sums.by_projection(), names, strict=True) for name in named
        ]
        return [
            mx.zeros_like(array) if gradient is None else gradient.astype(array.dtype)
            for gradient, array in zip([dx, dscores, *d_arguments], [x, scores, *arguments], strict=True)
        ]

    def _backward_chunk(
        self,
        sums: GradientSums,
        dy: mx.array,
        x: mx.array,
        scores: mx.array,
        chunk: Chunk,
        inner: InnerRows | None,
    ) -> tuple[mx.array, mx.array]:
        """Return the chunk's dx [t, m, D] and dscore [t, m], and add its part to `sums`."""
        readers, down, experts = sums.readers, sums.down, chunk.experts
        rows = self._tiles(x, chunk.token)
        # The cotangents of the experts' outputs, not yet multiplied by the scores.
        cotangent = self._tiles(dy, chunk.token if self.summed else chunk.pair).astype(rows.dtype)
        score = scores_of(scores, chunk)
        d_low_rank = down.d_low_rank(cotangent, chunk)
        dhidden = down.backward(cotangent, d_low_rank, chunk, down.unpacked_matrices(experts, rows.dtype))
        # Unpacked matrices take most of a chunk's memory, so those of up and gate wait until down's are not needed.
        experts_later = mx.depends([experts], [dhidden])[0]
        matrices = [p.unpacked_matrices(experts_later, rows.dtype) for p in readers]
        inner = inner or InnerRows.of(readers, rows, chunk, matrices)
        hidden, dinner, dscore = self._of_activation(inner.outputs, dhidden, score)
        if down.bias is not None:
            dscore = dscore + (cotangent.astype(mx.float32) * down.bias[experts][:, None]).sum(axis=-1)
        if chunk.valid is not None:
            dscore = dscore * chunk.valid.reshape(dscore.shape)
        if down.trains:
            low_rank = down.low_rank(hidden, chunk) if inner.of_down is None else inner.of_down
            sums.add_down(WithLowRank(hidden, low_rank), WithLowRank(cotangent, d_low_rank), chunk, score)
        d_low_ranks = [p.d_low_rank(d, chunk) for p, d in zip(readers, dinner, strict=True)]
        drows: mx.array | None = None
        for p, d, low_rank, matrix in zip(readers, dinner, d_low_ranks, matrices, strict=True):
            drows = p.backward(d, low_rank, chunk, matrix, drows)
        assert drows is not None
        sums.add_readers(rows, inner.low_ranks, dinner, d_low_ranks, chunk)
        return drows, dscore

    def _of_activation(
        self, inner: list[mx.array], dhidden: mx.array, score: mx.array
    ) -> tuple[mx.array, list[mx.array], mx.array]:
        """Return the hidden rows [t, m, I], the gradients of `inner`, and those of the scores without biases [t, m].

        `dhidden` lacks the factor `score` [t, m, 1].
        """
        if self.activation is swiglu and isinstance(self.layout, Sorted):
            up, gate, d = (array.squeeze(1) for array in (*inner, dhidden))
            if scored_swiglu.serves(gate, up, d):
                hidden, dgate, dup, dscore = scored_swiglu.gradients(gate, up, d, score.reshape(-1))
                return hidden[:, None], [dup[:, None], dgate[:, None]], dscore[:, None]
        return scored_swiglu.with_mlx(self.activation, inner, dhidden, score)

    def _tiles(self, x: mx.array, rows: mx.array) -> mx.array:
        tiles = self.layout.tiles(x, rows)
        return tiles.astype(mx.float32) if self.in_fp32 else tiles

    def _with_arguments(self, arguments: _Arrays, dtype: mx.Dtype) -> tuple[list[Projection], Projection]:
        remaining = iter(arguments)
        up, down, *gate = [
            p.with_arguments(*islice(remaining, len(p.argument_names))).with_factors_for(dtype)
            for p in self.projections
        ]
        return [up, *gate], down


def _layout(projections: list[Projection], tokens: int, top_k: int) -> Tiled | Sorted:
    experts = projections[0].experts
    pairs = tokens * top_k
    outer, inner = projections[0].inputs, projections[0].outputs
    row_bytes = 4 * (3 * outer + 6 * inner)
    if not backend.computes_in_fp32():
        chunk_bytes = max(GPU_CHUNK_BYTES, backend.here({"metal": int(_PART_OF_MEMORY * backend.gpu_memory())}, 0))
        rows = max(chunk_bytes // row_bytes, backend.here(ROWS_PER_EXPERT) * experts)
        return Sorted(tokens, top_k, experts, max(1, rows // top_k))
    copies = any(p.copies_matrix_per_tile() for p in projections)
    packed = any(p.scales is not None for p in projections)
    trains = any("weight" in p.trains for p in projections)
    # The first of these that holds says what a tile costs.
    costs = ((packed, PACKED_COST), (copies, HALF_COST), (trains, TRAINED_COST), (True, DENSE_COST))
    cost = next(cost for holds, cost in costs if holds)
    tile = tile_rows(pairs, experts, cost)
    tile_bytes = tile * row_bytes + (8 * outer * inner if copies or trains else 0)
    return Tiled(pairs, top_k, experts, tile, max(1, CPU_CHUNK_BYTES // tile_bytes))


def _check(
    x: mx.array,
    indices: mx.array,
    scores: mx.array | None,
    up: Projection,
    down: Projection,
    gate: Projection | None,
) -> None:
    tokens = tuple(x.shape[:-1])
    width = x.shape[-1]
    if not is_floating(x) or x.size == 0:
        raise ValueError(f"expert_block: x must be [..., D] floats with a token in it, got {list(x.shape)} {x.dtype}.")
    if tuple(indices.shape[:-1]) != tokens or not mx.issubdtype(indices.dtype, mx.integer):
        raise ValueError(
            f"expert_block: indices must be integers {[*tokens, 'k']}, got {list(indices.shape)} {indices.dtype}."
        )
    if scores is not None and scores.shape != indices.shape:
        raise ValueError(f"expert_block: scores must be {list(indices.shape)}, as indices, got {list(scores.shape)}.")
    expected = {"up": (up, width, up.outputs), "down": (down, up.outputs, width)}
    if gate is not None:
        expected["gate"] = (gate, width, up.outputs)
    for name, (projection, inputs, outputs) in expected.items():
        sizes = (projection.experts, projection.outputs, projection.inputs)
        if sizes != (up.experts, outputs, inputs):
            raise ValueError(
                f"expert_block: {name} must be [experts, out, in] {[up.experts, outputs, inputs]}, got {list(sizes)}."
            )
        a, b = projection.lora_a, projection.lora_b
        if a is None or b is None:
            continue
        rank = a.shape[1]
        if a.shape != (up.experts, rank, inputs) or b.shape != (up.experts, outputs, rank):
            raise ValueError(
                f"expert_block: the adapter of {name} must be A {[up.experts, rank, inputs]} and "
                f"B {[up.experts, outputs, rank]}, got {list(a.shape)} and {list(b.shape)}."
            )
