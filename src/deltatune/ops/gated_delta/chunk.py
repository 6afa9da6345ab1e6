"""The chunkwise form: matrix products inside chunks, a short loop across them, and a hand-written backward pass.

The forward pass saves one state per chunk. The backward pass takes groups of chunks in reverse order and recomputes
everything else. README.md in this folder derives the formulas.

A sequence is [B, T, H, ...]. A group of n chunks is [n, B, K, H / K, C, ...]: K key heads, C tokens per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ...machine import backend
from ..functional import refuse_second_derivative
from ..recomputation import Input, input_of
from ..tracing import trace
from ..tracing.turns import blank, turns
from . import channel, scalar
from .across import backward_across, forward_across
from .group import IN_FP32, Gradients, Group, MatrixProducts
from .transforms import no_second_derivative, over_batch

# Elements of k, over all its heads, that one group lays out: enough to keep the device busy, few enough for its caches.
_GROUP_ELEMENTS = {"cpu": 16 * 64 * 128, "metal": 1024 * 64 * 128, "cuda": 1024 * 64 * 128}


class Span(NamedTuple):
    """The tokens [start, stop) of one group and the number of its chunks; the last chunk may lack tokens.

    `left_out` counts the groups for which it stands in the trace of a plan (turns.py).
    """

    start: int
    stop: int
    chunks: int
    left_out: int = 0


class Chunking(NamedTuple):
    """How a sequence of `length` tokens is processed: chunks of `size` tokens, `group` chunks at a time."""

    length: int
    size: int
    group: int
    products: MatrixProducts = IN_FP32

    def groups(self) -> list[Span]:
        """Return the groups, which cover the sequence once, in order."""
        tokens = self.size * self.group
        spans = turns([*range(0, self.length, tokens), self.length])
        return [Span(turn.start, turn.stop, -(-(turn.stop - turn.start) // self.size), turn.left_out) for turn in spans]


def choose_chunking(length: int, heads: int, key_size: int, products: MatrixProducts = IN_FP32) -> Chunking:
    """Choose chunk and group sizes for T = `length` and `heads` = B x Hv (docs/decisions/gated-delta.md)."""
    size = 64 if key_size > 64 else 32
    while size > 16 and size // 2 >= length:
        size //= 2
    elements = backend.here(_GROUP_ELEMENTS)
    return Chunking(length, size, max(1, min(16, elements // (heads * size * key_size))), products)


def group_of(x: mx.array, span: Span, size: int, key_heads: int) -> mx.array:
    """Return the tokens of `span` in x [B, T, H, ...] as chunks [n, B, K, H / K, C, ...].

    Zeros fill the last chunk after the last token.
    """
    start, stop, count, _ = span
    part = x[:, start:stop]
    missing = count * size - (stop - start)
    if missing:
        part = mx.pad(part, [(0, 0), (0, missing)] + [(0, 0)] * (part.ndim - 2))
    batch, _, heads, *sizes = part.shape
    part = part.reshape(batch, count, size, key_heads, heads // key_heads, *sizes)
    return part.transpose(1, 0, 3, 4, 2, *range(5, part.ndim))


def empty_chunks(like: mx.array, chunking: Chunking, key_heads: int) -> mx.array:
    """Return zeros [B, chunks, C, K, H / K, ...], into which `write_group` puts a sequence like `like` [B, T, H, ...].

    MLX writes into an array without a copy as long as nothing else reads it, so this takes half the peak memory of
    collecting the groups and concatenating them.
    """
    batch, length, heads, *sizes = like.shape
    chunks = -(-length // chunking.size)
    return mx.zeros((batch, chunks, chunking.size, key_heads, heads // key_heads, *sizes), dtype=like.dtype)


def write_group(chunks: mx.array, group: mx.array, span: Span, chunking: Chunking) -> None:
    """Write a group, in the layout of `group_of`, to its place in an array made by `empty_chunks`."""
    first = span.start // chunking.size
    group = group.transpose(1, 0, 4, 2, 3, *range(5, group.ndim))
    chunks[:, first : first + span.chunks] = group.astype(chunks.dtype)


def sequence_of(chunks: mx.array, chunking: Chunking) -> mx.array:
    """Return an array made by `empty_chunks` as a sequence [B, T, H, ...]."""
    batch, count, size, key_heads, repeats, *sizes = chunks.shape
    return chunks.reshape(batch, count * size, key_heads * repeats, *sizes)[:, : chunking.length]


_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]


def gated_delta_chunk(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array | None,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
    products: MatrixProducts = IN_FP32,
) -> tuple[mx.array, mx.array]:
    """Compute the chunkwise form, with a hand-derived backward pass. Arguments and results are those of `gated_delta`.

    Without `beta` they are those of `linear_attention`. With one gate per head, `products` multiply. It runs on every
    device and in mx.vmap, mx.compile and mx.checkpoint; a second derivative raises NotImplementedError. Sources: arXiv
    2406.06484 (chunks), 2412.06464 (gates), 2510.26692 (gates per channel); README.md in this folder.
    """
    batch, length, value_heads, value_size = v.shape
    inputs = input_of(q, k, v)
    log_g, written = effective_gates(log_g, v if beta is None else beta.astype(mx.float32), mask, segments)
    floats = [q, k, written, log_g] if beta is None else [q, k, v, log_g, written]
    if initial_state is None:
        initial_state = mx.zeros((batch, value_heads, value_size, k.shape[-1]), dtype=mx.float32)
    chunking = choose_chunking(length, batch * value_heads, k.shape[-1], products)
    # The trace of a plan has fewer groups.
    keeps = inputs.compute is None and not trace.current().shortened
    forward = _keeping(chunking, len(floats)) if keeps else _differentiable(chunking, len(floats), inputs)
    y, state, *_ = forward(*floats, initial_state.astype(mx.float32))
    if mask is not None:
        y = mx.where(mask[..., None, None], y, mx.zeros((), y.dtype))
    return y, state


def effective_gates(
    log_g: mx.array, written: mx.array, mask: mx.array | None, segments: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return log_g in fp32 and beta under which a masked step does nothing and a new segment starts from a zero state.

    A masked step gets gate 1 and beta 0 (without beta, `written` is v, which becomes 0). The first step of a segment
    gets gate 0, whether it is masked or not. All are constants, so no gradient reaches log_g, beta or v there.
    """
    log_g = log_g.astype(mx.float32)
    if mask is not None:
        written = mx.where(_broadcastable(mask, written), written, mx.zeros((), written.dtype))
        log_g = mx.where(_broadcastable(mask, log_g), log_g, 0.0)
    if segments is not None:
        changed = segments[:, 1:] != segments[:, :-1]
        restart = mx.concatenate([mx.zeros((changed.shape[0], 1), dtype=mx.bool_), changed], axis=1)
        log_g = mx.where(_broadcastable(restart, log_g), -mx.inf, log_g)
    return log_g, written


def _broadcastable(flags: mx.array, array: mx.array) -> mx.array:
    """Return flags [B, T] with axes of 1 appended, so that they broadcast over an array [B, T, ...]."""
    return flags.reshape(*flags.shape, *(1,) * (array.ndim - 2))


@lru_cache
def _keeping(chunking: Chunking, floats: int) -> _Function:
    """Return f(q, k, v, log_g, beta, state) -> (y, final state, one array per group: the states before its chunks)."""
    return _differentiable(chunking, floats, Input(None))


def _differentiable(chunking: Chunking, floats: int, source: Input) -> _Function:
    """Return the function of so many arrays and a state, with a backward pass that gets q, k and v from `source`."""
    forward = mx.custom_function(lambda *arrays: _forward(chunking, *arrays))
    backward = mx.custom_function(lambda *arrays: _backward(chunking, floats, *arrays))
    call_forward, call_backward = cast(_Function, forward), cast(_Function, backward)
    batch_of_states = [1] * len(chunking.groups())

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        inputs = source.again(primals[:3], cotangents[:2])
        return call_backward(*inputs, *primals[3:floats], *cotangents[:2], *outputs[2:])

    forward.vjp(vjp)
    backward.vjp(refuse_second_derivative(no_second_derivative(floats == 5)))
    forward.vmap(over_batch(call_forward, [0] * (floats + 1), [0, 0, *batch_of_states]))
    backward.vmap(over_batch(call_backward, [0] * (floats + 2) + batch_of_states, [0] * (floats + 1)))
    return call_forward


def _load_group(inputs: Sequence[mx.array], span: Span, size: int, previous: Sequence[mx.array]) -> list[mx.array]:
    """Copy the chunks of one group out of q, k and the other inputs, in fp32: q above k, then the others.

    An empty slice of each array in `previous` joins every copy, so that MLX does not make the copies of a group before
    the group before it is done. For the first group, `previous` contains the inputs: if mx.vmap maps one of them, every
    copy is mapped, which mx.addmm needs (it refuses to map its argument c alone).
    """
    key_heads = inputs[1].shape[2]
    q, k, *others = (group_of(x, span, size, key_heads) for x in inputs)
    nothing = mx.concatenate([x[..., :0].reshape(0) for x in previous])

    def copied(*parts: mx.array) -> mx.array:
        shape, dtype = parts[0].shape, parts[0].dtype
        empty = nothing.astype(dtype).reshape(*shape[:4], 0, *shape[5:])
        # A cast before would be one of the forward and the backward pass, and be kept between them.
        return mx.concatenate([*parts, empty], axis=4).astype(mx.float32)

    return [copied(q, k), *map(copied, others)]


def _group_forward(gates: Any, group: Group, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return y of a group, the states before its chunks, and the state after it; `gates` is scalar or channel."""
    chunks = gates.without_state(group)
    states, delta, state = forward_across(group.products, chunks.u, chunks.w, chunks.k_end, chunks.total, state)
    return gates.outputs(group, chunks, states, delta), states, state


def _group_backward(gates: Any, group: Group, states: mx.array, dy: mx.array, dstate: mx.array) -> Gradients:
    """Return the gradients of a group and of the state before it, from those of its y and of the state after it."""
    chunks = gates.without_state(group)
    delta = chunks.u
    if chunks.w is not None:
        delta = group.products.added(delta, chunks.w, states.swapaxes(-1, -2), -1.0)
    ddelta_y, dstate_y = gates.output_gradients(group, chunks, dy)
    factors = chunks.w, chunks.k_end, chunks.total
    across = backward_across(group.products, ddelta_y, dstate_y, *factors, dstate)
    return gates.input_gradients(group, chunks, states, delta, dy, across)


def _forward(chunking: Chunking, *arrays: mx.array) -> _Arrays:
    """Return y, the final state, and for each group the states before its chunks.

    `arrays` are q, k, v, log_g, beta, if there is one, and the state.
    """
    *inputs, state = arrays
    q, k, v, log_g = inputs[:4]
    gates: Any = channel if log_g.ndim == 4 else scalar
    group_state = state.reshape(state.shape[0], k.shape[2], -1, *state.shape[2:])
    outputs = empty_chunks(v.astype(q.dtype), chunking, k.shape[2])
    saved: list[mx.array] = []
    previous = [group_state, *inputs]
    for span in chunking.groups():
        if span.left_out:
            saved.append(blank(saved[-1], span.chunks, previous))
            previous = [outputs, saved[-1], group_state]
            continue
        group = Group(chunking.products, *_load_group(inputs, span, chunking.size, previous))
        y, states, group_state = _group_forward(gates, group, group_state)
        write_group(outputs, y, span, chunking)
        saved.append(states)
        previous = [outputs, states, group_state]
    return sequence_of(outputs, chunking), group_state.reshape(state.shape), *saved


def _backward(chunking: Chunking, floats: int, *arrays: mx.array) -> _Arrays:
    """Return the gradients of q, k, v, log_g, beta and the initial state, in their dtypes.

    `arrays` are those inputs without the state, the gradients of y and of the final state, and the saved tensors.
    """
    inputs = arrays[:floats]
    k, log_g = inputs[1], inputs[3]
    dy, dstate, *saved = arrays[floats:]
    gates: Any = channel if log_g.ndim == 4 else scalar
    group_dstate = dstate.reshape(dstate.shape[0], k.shape[2], -1, *dstate.shape[2:])
    results = [empty_chunks(x, chunking, k.shape[2]) for x in inputs]
    previous = [group_dstate, *inputs, dy]
    for span, states in zip(reversed(chunking.groups()), reversed(saved), strict=True):
        if span.left_out:
            previous = [*previous, states]
            continue
        *parts, group_dy = _load_group((*inputs, dy), span, chunking.size, previous)
        group = Group(chunking.products, *parts)
        gradients = _group_backward(gates, group, states, group_dy, group_dstate)
        group_dstate = gradients.state
        inputs_alone = [gradient for gradient in gradients[:-1] if gradient is not None]
        for result, gradient in zip(results, inputs_alone, strict=True):
            write_group(result, gradient, span, chunking)
        previous = [*results, group_dstate]
    return *(sequence_of(result, chunking) for result in results), group_dstate.reshape(dstate.shape)
