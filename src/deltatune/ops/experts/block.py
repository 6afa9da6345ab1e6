"""expert_block(): gate, up and down of the experts that the router chose, weighted and summed, with a VJP by hand.

Nothing is kept for the backward pass but the inputs: chunks of rows run again there, one after another. For a row
x of token n with expert e and score s, y = s f_e(x), and with c = dL/dy_n:
    dh = s W_down^T c,  ds = <W_down^T c, h> + <bias_down, c>,
so that no output is computed a second time for the scores' sake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx

from ...machine import backend
from ..functional import is_floating, promoted
from .activation import swiglu
from .projection import Projection
from .tiles import Chunk, Sorted, Tiled, scores_of, tile_rows

Activation = Callable[..., mx.array]
_Arrays = Sequence[mx.array]

# Working memory of one chunk of rows, in bytes of fp32.
CPU_CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 256 * 2**20
# Rows of a GPU's chunk for each expert, at least: fewer would read every matrix for little, and on CUDA fill no tile.
ROWS_AN_EXPERT = {"metal": 4, "cuda": 128}

# What a tile costs beyond its rows, in rows: a BLAS call; a matrix copied in fp32; unpacked; its gradient added up.
DENSE_COST, HALF_COST, PACKED_COST, TRAINED_COST = 27, 60, 400, 200


def expert_block(
    x: mx.array,
    indices: mx.array,
    scores: mx.array | None,
    up: Projection,
    down: Projection,
    gate: Projection | None = None,
    activation: Activation = swiglu,
) -> mx.array:
    """sum over k of scores * down(activation(up(x), gate(x))), each by the expert that `indices` names.

    Args:
        x: [..., D], fp32, bf16 or fp16.
        indices: [..., k] integers from 0 to E - 1; they get no gradient. Values are data, which a lazy graph cannot
            refuse: the output of a token with another one is NaN, and so is its gradient.
        scores: [..., k]; None leaves the outputs of the experts apart.
        up, down, gate: D -> I, I -> D, D -> I. Without gate the activation has one argument.
        activation: elementwise, without parameters of its own.

    Returns [..., D], or [..., k, D] without scores, in the dtype of x * scores. Gradients reach x, scores, and what
    each projection names in `trains`. On a CPU every product is fp32, whatever the dtype.

    Raises ValueError for shapes that disagree, NotImplementedError for a second derivative.
    """
    _check(x, indices, scores, up, down, gate)
    lead, top_k = indices.shape[:-1], indices.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    flat = mx.stop_gradient(indices).reshape(-1, top_k)
    # MLX would write past the end of memory for an expert that is not there. A negative number is a large one here.
    flat = flat.astype(mx.uint32)
    known = flat < _constant(up.experts, mx.uint32)
    flat = flat * known
    projections = [up, down] if gate is None else [up, down, gate]
    layout = _layout(projections, *flat.shape)
    block = _Block(projections, activation, layout, scores is not None)
    weights = mx.ones(flat.size, x.dtype) if scores is None else scores.reshape(-1)
    weights = mx.where(known.reshape(-1), weights, _constant(math.nan, weights.dtype))
    placed = layout.sort(flat)
    arrays = [array for projection in projections for array in projection.arrays()]
    y = block.function(len(placed))(rows, weights, *placed, *arrays)
    return y.reshape(*lead, -1) if scores is not None else y.reshape(*lead, top_k, -1)


@cache
def _constant(value: float, dtype: mx.Dtype) -> mx.array:
    """One buffer for all layers and traces, which keep the constants that they are made with."""
    return mx.array(value, dtype)


class _Block:
    """One call's sizes and frozen weights: forward and backward over its chunks.

    Nothing in it is computed in the call: a compiled step keeps the closures of its gradients, and through such an
    array all of the graph that led there, with every constant in it.
    """

    def __init__(self, projections: list[Projection], activation: Activation, layout: Tiled | Sorted, summed: bool):
        self.projections = [projection.without_arrays() for projection in projections]
        self.activation, self.layout, self.summed = activation, layout, summed
        self.wide = backend.device() == "cpu"

    def function(self, placed: int) -> Callable[..., mx.array]:
        """f(x, scores, the layout's `placed` arrays, the projections' given arrays) -> y."""
        forward: Any = mx.custom_function(
            lambda x, scores, *more: self.forward(x, scores, more[:placed], more[placed:])
        )
        backward: Any = mx.custom_function(
            lambda dy, x, scores, *more: self.backward(dy, x, scores, more[:placed], more[placed:])
        )

        def vjp(primals: Any, cotangent: mx.array, _output: mx.array) -> Any:
            dx, dscores, *found = backward(cotangent, *primals)
            return [dx, dscores, *map(mx.zeros_like, primals[2 : 2 + placed]), *found]

        def refuse(*_: object) -> None:
            raise NotImplementedError("expert_block has no second derivative: its backward pass is written by hand.")

        forward.vjp(vjp)
        backward.vjp(refuse)
        return forward

    def forward(self, x: mx.array, scores: mx.array, placed: _Arrays, given: _Arrays) -> mx.array:
        up, down, *gate = self._around(given, x.dtype)
        layout = self.layout
        result = promoted(x.dtype, scores.dtype)
        kind = mx.float32 if self.wide else result
        total = mx.zeros((x.shape[0] if self.summed else scores.size, down.outputs), kind)
        for number in range(layout.chunks):
            chunk = layout.chunk(placed, number, [total] if number else [])
            rows = self._rows(x, chunk.source)
            inner = [each.forward(rows, chunk, each.dense(chunk.experts))[0] for each in (up, *gate)]
            y, _ = down.forward(self.activation(*inner), chunk, down.dense(chunk.experts))
            if self.summed:
                total = layout.add_to_tokens(total, y, chunk, scores)
            else:
                total = layout.add_to_pairs(total, y * scores_of(scores, chunk).astype(y.dtype), chunk)
        return total.astype(result)

    def backward(self, dy: mx.array, x: mx.array, scores: mx.array, placed: _Arrays, given: _Arrays) -> list[mx.array]:
        """Gradients of x, scores, and each of `given`."""
        projections = self._around(given, x.dtype)
        layout = self.layout
        dx = mx.zeros(x.shape, mx.float32 if self.wide else x.dtype)
        dscores = mx.zeros(scores.size)
        gradients = [{name: mx.zeros(getattr(p, name).shape) for name in p.trains} for p in projections]
        for number in range(layout.chunks):
            done = [dx, dscores, *(array for each in gradients for array in each.values())]
            chunk = layout.chunk(placed, number, done if number else [])
            tiles, dscore = self._backward_chunk(projections, gradients, dy, x, scores, chunk)
            dx = layout.add_to_tokens(dx, tiles, chunk)
            dscores = layout.add_to_pairs(dscores, dscore, chunk)
        more = [each.get(name) for p, each in zip(projections, gradients, strict=True) for name in p.given]
        return [
            mx.zeros_like(array) if gradient is None else gradient.astype(array.dtype)
            for gradient, array in zip([dx, dscores, *more], [x, scores, *given], strict=True)
        ]

    def _backward_chunk(
        self,
        projections: list[Projection],
        gradients: list[dict[str, mx.array]],
        dy: mx.array,
        x: mx.array,
        scores: mx.array,
        chunk: Chunk,
    ) -> tuple[mx.array, mx.array]:
        """The chunk's dx [t, m, D] and dscore [t, m]; adds its part to `gradients`."""
        up, down, *gate = projections
        experts = chunk.experts
        rows = self._rows(x, chunk.source)
        arriving = self._rows(dy, chunk.source if self.summed else chunk.pair).astype(rows.dtype)
        score = scores_of(scores, chunk)
        dhidden, ddown = down.backward(arriving, chunk, down.dense(experts))
        # Matrices in fp32 are what a chunk holds most of: down's is done with before the others are made.
        later = mx.depends([experts], [dhidden])[0]
        held = [p.dense(later) for p in (up, *gate)]
        both = [p.forward(rows, chunk, dense) for p, dense in zip((up, *gate), held, strict=True)]
        inner, lows = zip(*both, strict=True)
        weighted = dhidden * score.astype(dhidden.dtype)
        (hidden,), dinner = mx.vjp(lambda *a: [self.activation(*a)], list(inner), [weighted])
        dscore = (dhidden.astype(mx.float32) * hidden).sum(axis=-1)
        if down.bias is not None:
            dscore = dscore + (arriving.astype(mx.float32) * down.bias[experts][:, None]).sum(axis=-1)
        if chunk.valid is not None:
            dscore = dscore * chunk.valid.reshape(dscore.shape)
        dy_rows = arriving * score.astype(arriving.dtype)
        if down.trains:
            low = None
            if down.lora_a is not None and ddown is not None:
                low = down.low(hidden, chunk)
                ddown = (ddown * score).astype(ddown.dtype)
            self._accumulate(gradients[1], down, hidden, low, dy_rows, ddown, chunk)
        total = None
        for index, p, dense, low, d in zip((0, 2), (up, *gate), held, lows, dinner, strict=False):
            drows, dlow = p.backward(d, chunk, dense)
            total = drows if total is None else total + drows
            self._accumulate(gradients[index], p, rows, low, d, dlow, chunk)
        assert total is not None
        return total, dscore

    def _accumulate(
        self,
        gradients: dict[str, mx.array],
        projection: Projection,
        rows: mx.array,
        low: mx.array | None,
        d: mx.array,
        dlow: mx.array | None,
        chunk: Chunk,
    ) -> None:
        add = self.layout.add_products
        for name, total in gradients.items():
            if name == "lora_a":
                assert dlow is not None
                gradients[name] = add(total, dlow, projection.dropped(rows, chunk.number), chunk)
            elif name == "lora_b":
                assert low is not None
                gradients[name] = add(total, d, low, chunk, projection.scale)
            elif name == "weight":
                gradients[name] = add(total, d, rows, chunk)
            else:
                ones = mx.ones((*d.shape[:2], 1), d.dtype)
                gradients[name] = add(total[..., None], d, ones, chunk).squeeze(-1)

    def _rows(self, x: mx.array, rows: mx.array) -> mx.array:
        tiles = self.layout.laid_out(x, rows)
        return tiles.astype(mx.float32) if self.wide else tiles

    def _around(self, given: _Arrays, dtype: mx.Dtype) -> list[Projection]:
        left = iter(given)
        return [each.around(*islice(left, len(each.given))).narrowed(dtype) for each in self.projections]


def _layout(projections: list[Projection], tokens: int, top_k: int) -> Tiled | Sorted:
    """Sizes of tiles and chunks, from shapes alone."""
    experts, pairs = projections[0].experts, tokens * top_k
    outer, inner = projections[0].inputs, projections[0].outputs
    row_bytes = 4 * (3 * outer + 6 * inner)
    if backend.device() != "cpu":
        rows = max(GPU_CHUNK_BYTES // row_bytes, ROWS_AN_EXPERT[backend.device()] * experts)
        return Sorted(tokens, top_k, experts, max(1, rows // top_k))
    copies = any(p.gathers_whole_weights() for p in projections)
    packed = any(p.scales is not None for p in projections)
    trains = any("weight" in p.trains for p in projections)
    cost = PACKED_COST if packed else HALF_COST if copies else TRAINED_COST if trains else DENSE_COST
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
    tokens, width = tuple(x.shape[:-1]), x.shape[-1]
    if not is_floating(x) or x.size == 0:
        raise ValueError(f"expert_block: x must be [..., D] floats with a token in it, got {list(x.shape)} {x.dtype}.")
    if tuple(indices.shape[:-1]) != tokens or not mx.issubdtype(indices.dtype, mx.integer):
        raise ValueError(
            f"expert_block: indices must be integers {[*tokens, 'k']}, got {list(indices.shape)} {indices.dtype}."
        )
    if scores is not None and scores.shape != indices.shape:
        raise ValueError(f"expert_block: scores must be {list(indices.shape)}, as indices, got {list(scores.shape)}.")
    wanted = {"up": (up, width, up.outputs), "down": (down, up.outputs, width)}
    if gate is not None:
        wanted["gate"] = (gate, width, up.outputs)
    for name, (projection, inputs, outputs) in wanted.items():
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
