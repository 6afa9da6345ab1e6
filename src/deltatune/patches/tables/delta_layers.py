"""Replaces the forward pass of the gated-delta layers of Qwen3.5 and Qwen3-Next in training.

Between the projections and the recurrence upstream joins a state of zeros to the rows, convolves them, splits the
result into queries, keys and values, and norms the first two. On an NVIDIA GPU each kernel there copies its part of the
split, and the backward pass joins the three gradients and cuts the state off again; in the place of all this, one
kernel reads the projection and writes three arrays, and one goes back. On an Apple GPU MLX's operations stay, but their
gradient saves only the projection, and recomputes the rest (ops/recomputation.py).

Versions read: mlx-lm 0.32.0 to 0.32.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...layers import ENTRY_POINT
from ...lora.linear import projected as token_projections
from ...ops import pieces
from ...ops.causal_conv import joined_conv
from ...ops.decoding import delta_token
from ...ops.decoding.delta_token import DeltaToken, TokenArrays
from ...ops.decoding.row_caches import RecurrentRows
from ...ops.pointwise import conv
from ...ops.pointwise.passes import OPERATOR as PASSES
from ...ops.recomputation import from_inputs, keeps_inputs_alone, remembered
from ...ops.tracing import trace
from ..patch_record import Function, Patch
from ..small_cases import (
    BOUND,
    WIDTH,
    answering,
    built,
    describe_difference,
    drawn,
    layer_input,
    of_config,
    same_layer,
    serving,
)

_EPS = 1e-6


class _Projected(NamedTuple):
    """The projections of a layer's input: q, k and v beside one another [B, T, C], z [B, T, Hv, Dv], b and a."""

    qkv: mx.array
    z: mx.array
    b: mx.array
    a: mx.array


def _of_qwen3_5(layer: Any, x: mx.array) -> _Projected:
    qkv, z = layer.in_proj_qkv(x), layer.in_proj_z(x)
    z = z.reshape(*x.shape[:2], layer.num_v_heads, layer.head_v_dim)
    return _Projected(qkv, z, layer.in_proj_b(x), layer.in_proj_a(x))


def _of_qwen3_next(layer: Any, x: mx.array) -> _Projected:
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return _Projected(mx.concatenate([part.reshape(*x.shape[:2], -1) for part in (q, k, v)], axis=-1), z, b, a)


def _norms(layer: Any) -> conv.NormedHeads:
    """The norms of a layer's queries and keys; upstream adds its eps to the sum of the squares."""
    size = layer.head_k_dim
    return conv.NormedHeads(layer.num_k_heads, size, 1 / size, size**-0.5, _EPS / size)


def _trained_here(layer: Any, x: mx.array, cache: Any) -> bool:
    """Whether a call is a training step of one device that gains by it, on whole rows or on a piece of one."""
    if not (cache is None or isinstance(cache, pieces.States)) or not layer.training:
        return False
    if getattr(layer, "sharding_group", None) is not None:
        return False
    if not PASSES.is_for_here and not keeps_inputs_alone():
        return False
    documents = trace.current().segments
    taps = layer.conv1d
    plain = type(taps) is nn.Conv1d and "bias" not in taps and (taps.stride, taps.padding, taps.dilation) == (1, 0, 1)
    fits = documents is None or documents.shape == x.shape[:2]
    return plain and fits


class _Heads:
    """How a layer makes queries, keys and values of its projection [B, T, C]: in one pass, or by MLX's operations.

    The rows before the projection's first are `before`, [B, K - 1, C], or None for zeros.
    """

    def __init__(self, layer: Any, norms: conv.NormedHeads, before: mx.array | None, documents: mx.array | None):
        self.weight = layer.conv1d.weight[..., 0]
        self.norms = norms
        self.before = before
        self.documents = documents
        self.of_values = (layer.num_v_heads, layer.head_v_dim)

    def serves(self, qkv: mx.array) -> bool:
        """Whether this is to be used in the place of upstream's code, for a call that is `_trained_here`."""
        return keeps_inputs_alone() or self._by_kernel(qkv)

    def __call__(self, qkv: mx.array) -> list[mx.array]:
        if self._by_kernel(qkv):
            q, k, v = conv.conv_heads(qkv, self.weight, self.norms, self.before, self.documents)
        else:
            q, k, v = from_inputs(self._by_mlx, qkv, self.weight, *([] if self.before is None else [self.before]))
        return [q, k, mx.unflatten(v, -1, self.of_values)]

    def _by_kernel(self, qkv: mx.array) -> bool:
        return conv.serves_heads(qkv, self.weight, self.norms, self.before, self.documents)

    def _by_mlx(self, qkv: mx.array, weight: mx.array, *before: mx.array) -> list[mx.array]:
        """Queries and keys [B, T, Hk, Dk] and values [B, T, Hv Dv], as upstream computes them."""
        norms = self.norms
        batch, _, channels = qkv.shape
        (state,) = before or [mx.zeros((batch, weight.shape[1] - 1, channels), qkv.dtype)]
        y = nn.silu(joined_conv(mx.concatenate([state, qkv], axis=1), weight, self.documents))
        *both, v = mx.split(y, [norms.channels, 2 * norms.channels], axis=-1)
        q, k = (mx.fast.rms_norm(mx.unflatten(x, -1, (norms.count, norms.size)), None, norms.eps) for x in both)
        return [norms.query_factor * q, norms.key_factor * k, v]


def _last_rows(before: mx.array | None, x: mx.array, count: int) -> mx.array:
    """The last `count` rows of the convolution's input: of x [B, T, C], and where that is shorter of `before` too."""
    if x.shape[1] < count:
        before = mx.zeros((x.shape[0], count, x.shape[2]), x.dtype) if before is None else before
        x = mx.concatenate([before, x], axis=1)
    return mx.contiguous(x[:, x.shape[1] - count :])


def _next_token(
    layer: Any, project: Callable[[Any, mx.array], _Projected], x: mx.array, cache: RecurrentRows
) -> mx.array | None:
    """The layer's output for one token of each row [B, 1, D], by one kernel; None where upstream's code serves."""
    taps = layer.conv1d
    if "bias" in taps or getattr(layer, "sharding_group", None) is not None:
        return None
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    projections = [layer[name] for name in names if name in layer]
    parts = project(layer, x) if len(projections) < len(names) else token_projections(projections, x)
    projected = tuple(part.reshape(x.shape[0], -1) for part in parts)
    kind = DeltaToken(_norms(layer), layer.num_v_heads, layer.head_v_dim, layer.norm.eps)
    weights = taps.weight[..., 0], layer.A_log, layer.dt_bias, layer.norm.weight
    before, state = cache.handed
    arrays = TokenArrays(projected, before, state, *weights)
    if not delta_token.serves(kind, arrays):
        return None
    y, cache[0], cache[1] = delta_token.delta_token(kind, arrays)
    return layer.out_proj(y[:, None])


def _layer(project: Callable[[Any, mx.array], _Projected]) -> Callable[[Function], Function]:
    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:  # noqa: N807
            if isinstance(cache, RecurrentRows):
                y = _next_token(self, project, inputs, cache)
                return upstream(self, inputs, mask, cache) if y is None else y
            if not _trained_here(self, inputs, cache):
                return upstream(self, inputs, mask, cache)
            qkv, z, b, a = project(self, inputs)
            before, state = (None, None) if cache is None else (cache[0], cache[1])
            heads = _Heads(self, _norms(self), before, trace.current().segments)
            if not heads.serves(qkv):
                return upstream(self, inputs, mask, cache)
            if mask is not None:
                qkv = mx.where(mask[..., None], qkv, 0)

            def normed(out: mx.array, z: mx.array) -> list[mx.array]:
                return [self.norm(out, z).reshape(*inputs.shape[:2], -1)]

            # Looked up at each call, since a patch replaces this function too.
            update = upstream.__globals__[ENTRY_POINT]
            q, k, v = remembered(heads, qkv)
            out, state = update(q, k, v, a, b, self.A_log, self.dt_bias, state, mask, use_kernel=False)
            if cache is not None:
                cache[0] = _last_rows(before, qkv, self.conv_kernel_size - 1)
                cache[1] = state
                cache.advance(inputs.shape[1])
            return self.out_proj(remembered(normed, out, z)[0])

        return __call__

    return replacement


def _same(upstream: Function, ours: Function) -> str | None:
    return same_layer(layer_input, inside=serving)(upstream, ours) or _same_next_token(upstream, ours)


def _same_next_token(upstream: Function, ours: Function) -> str | None:
    """Compare the output for one more token, and a row's caches then."""
    layer = built(upstream, of_config).eval()
    token = drawn(7, 1, 1, WIDTH)
    cache = upstream.__globals__["ArraysCache"](2)
    upstream(layer, layer_input(), None, cache)
    rows = RecurrentRows(cache.cache)
    with answering():
        actual = [ours(layer, token, None, rows), *rows.handed]
    expected = [upstream(layer, token, None, cache), *cache.cache]
    return describe_difference(actual, expected, BOUND, "upstream's next token")


def _record(module: str, name: str, project: Callable[[Any, mx.array], _Projected]) -> Patch:
    return Patch(
        module=f"mlx_lm.models.{module}",
        name=f"{name}.__call__",
        reason="its gradient keeps arrays that are cheap to compute again, and NVIDIA GPUs pass over memory often",
        without="Training needs more memory then, and an NVIDIA GPU takes longer; nothing else changes.",
        replacement=_layer(project),
        check=_same,
    )


PATCHES = (
    _record("qwen3_5", "GatedDeltaNet", _of_qwen3_5),
    _record("qwen3_next", "Qwen3NextGatedDeltaNet", _of_qwen3_next),
)
