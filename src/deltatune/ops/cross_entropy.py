"""Vocabulary loss that never holds [tokens, vocab]: the head runs on one chunk of tokens at a time.

In training the gradients of a chunk are taken as soon as its logits exist, so the head runs once, not twice; the
backward pass then only scales them. That a loss is linear in its own cotangent makes this exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from .functional import holding, trainable

# A chunk's logits in fp32, several times over at once, since MLX queues ahead: so many bytes, or what 128 tokens take
# if that is more (fewer would read the head's weights for little), but never more than the second. NVIDIA GPUs, where
# launches cost and products are fast, take four times that.
CHUNK_BYTES, MOST_BYTES, FEW_TOKENS, ON_CUDA = 16 * 2**20, 128 * 2**20, 128, 4


def linear_cross_entropy(
    head: nn.Module | Callable[[mx.array], mx.array],
    hidden: mx.array,
    targets: mx.array,
    weights: mx.array,
    *,
    chunk_tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Weighted sum of the tokens' cross-entropies of `head(hidden)` (nats), and the sum of the weights.

    Gradients reach `hidden`, `weights` and the head's trainable parameters, from whichever transform differentiates
    the call; frozen parameters get none and cost none. Log-sum-exp and sums are fp32. Gradients are taken during
    the forward pass while every part of the head is in training mode, and not before a backward pass asks for them
    when a part is in evaluation mode (`model.eval()`), where an evaluation does no gradient work. There the head runs
    again for the gradient, and a value and a gradient that are evaluated together hold one chunk each.

    Args:
        head: a module called as `head(hidden) -> logits [..., vocab]`, or a bound method of one, such as
            `model.embed_tokens.as_linear`. It must treat every token by itself.
        hidden: [..., D].
        targets: [...] integers; those of weight 0 may be negative (-100).
        weights: [...]; 0 leaves a token out. A sum of 0 gives loss 0 and zero gradients.
        chunk_tokens: tokens a chunk; None takes as many as CHUNK_BYTES of fp32 logits hold, or 128 if that is
            more and MOST_BYTES hold them; ON_CUDA times as many on an NVIDIA GPU.

    Returns:
        (loss_sum, weight_sum), fp32 scalars.

    Raises:
        ValueError: shapes that disagree, no tokens, targets that are not integers, a head without a module behind
            it, or a second derivative.
    """
    module = _module(head)
    _check(hidden, targets, weights, chunk_tokens)
    weights = weights.astype(mx.float32).reshape(-1)
    targets = mx.maximum(targets.reshape(-1), 0)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    size = chunk_tokens or _default_chunk(head, hidden)
    bounds = _even_bounds(hidden.shape[0], size)
    paths, parameters = trainable(module)

    def run(parameters: list[mx.array], rows: mx.array) -> mx.array:
        with holding(module, paths, parameters):
            return head(rows)

    eager = all(part.training for part in module.modules())
    loss = _loss(run, bounds, eager)(parameters, hidden, mx.stop_gradient(targets), weights)
    return loss, weights.sum()


def _loss(run: Callable, bounds: list[int], eager: bool) -> Callable[..., mx.array]:
    """(parameters, hidden, targets, weights) -> loss, with gradients for all but the targets."""

    def forward(parameters, hidden, targets, weights):
        if eager:
            return _gradients(run, bounds, parameters, hidden, targets, weights)
        return _values(run, bounds, parameters, hidden, targets, weights)

    def backward(primals, cotangents, outputs):
        if not eager:
            # Waits for the cotangent, so that no logits are made before the backward pass gets here.
            primals = _depends(primals, cotangents[0])
            outputs = _gradients(run, bounds, *primals)
        parameters, hidden, targets, _ = primals
        _, losses, d_hidden, d_parameters = outputs
        scaled = [_scale(d, cotangents[0], p) for d, p in zip(d_parameters, parameters, strict=True)]
        d_weights = _final(losses * cotangents[0])
        return scaled, _scale(d_hidden, cotangents[0], hidden), mx.zeros_like(targets), d_weights

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return lambda *arguments: function(*arguments)[0]


def _values(run, bounds, parameters, hidden, targets, weights):
    """(loss, loss of every token [N]), one chunk after another."""
    losses: list[mx.array] = []
    for start, stop in pairwise(bounds):
        rows = hidden[start:stop]
        if losses:
            rows = mx.depends([rows], [losses[-1]])[0]
        logits = run(parameters, rows).astype(mx.float32)
        chosen = mx.take_along_axis(logits, targets[start:stop, None], axis=-1).squeeze(-1)
        losses.append(mx.logsumexp(logits, axis=-1) - chosen)
    every = mx.concatenate(losses)
    return (every * weights).sum(), every


def _gradients(run, bounds, parameters, hidden, targets, weights):
    """(loss, loss of every token [N], d hidden, d parameters in fp32) for a cotangent of 1, chunk by chunk."""

    def chunk(differentiated, start, stop):
        *parameters, rows = differentiated
        # Without parameters the head's backward pass keeps rows apart: the gradient of `rows` is scaled, D wide.
        scale = weights[start:stop] if parameters else None
        loss, losses, _ = _chunk_loss(run(parameters, rows), targets[start:stop], scale)
        return loss, losses

    losses: list[mx.array] = []
    d_rows: list[mx.array] = []
    d_parameters: list[mx.array] = []
    for start, stop in pairwise(bounds):
        rows = hidden[start:stop]
        if losses:
            rows = mx.depends([rows], [losses[-1], d_rows[-1], *d_parameters])[0]
        (_, chunk_losses), grads = mx.value_and_grad(chunk)([*parameters, rows], start, stop)
        *new, d = [grad.astype(mx.float32) for grad in grads[:-1]], grads[-1]
        d_parameters = [old + more for old, more in zip(d_parameters, new[0], strict=True)] if losses else new[0]
        d_rows.append(d if parameters else (d * weights[start:stop, None]).astype(d.dtype))
        losses.append(chunk_losses)
    every = mx.concatenate(losses)
    return (every * weights).sum(), every, mx.concatenate(d_rows), d_parameters


def _chunk_forward(logits, targets, weights):
    """Loss (without weights: the sum), losses [n], probabilities [n, V]."""
    wide = logits.astype(mx.float32)
    chosen = mx.take_along_axis(wide, targets[:, None], axis=-1).squeeze(-1)
    probabilities = mx.softmax(wide, axis=-1)
    if backend.device() == "cpu":
        # One exponential an element serves the loss and its gradient.
        normalizer = wide.max(axis=-1) - mx.log(probabilities.max(axis=-1))
    else:
        normalizer = mx.logsumexp(wide, axis=-1)
    losses = normalizer - chosen
    return (losses if weights is None else losses * weights).sum(), losses, probabilities


def _chunk_backward(primals, cotangents, outputs):
    logits, targets, weights = primals
    probabilities, at = outputs[2], targets[:, None]
    scale = None if weights is None else (weights * cotangents[0])[:, None]
    if backend.device() == "cpu":
        # A condition in one pass: put_along_axis would copy the chunk first.
        hit = mx.arange(logits.shape[-1])[None] == at
        d_logits = mx.where(hit, probabilities - 1, probabilities)
        d_logits = (d_logits if scale is None else d_logits * scale).astype(logits.dtype)
    else:
        chosen = mx.take_along_axis(probabilities, at, axis=-1) - 1
        if scale is not None:
            probabilities, chosen = probabilities * scale, chosen * scale
        d_logits = mx.put_along_axis(probabilities.astype(logits.dtype), at, chosen.astype(logits.dtype), axis=-1)
    return (d_logits, mx.zeros_like(targets), *([] if weights is None else [mx.zeros_like(weights)]))


_chunk_loss: Any = mx.custom_function(_chunk_forward)
_chunk_loss.vjp(_chunk_backward)


def _scale(gradient: mx.array, cotangent: mx.array, like: mx.array) -> mx.array:
    return _final((gradient.astype(mx.float32) * cotangent).astype(like.dtype))


def _refuse(_primal, _cotangent, _output):
    raise ValueError("linear_cross_entropy has no second derivative.")


_final: Any = mx.custom_function(lambda gradient: gradient)
_final.vjp(_refuse)


def _depends(primals, cotangent):
    parameters, *rest = primals
    waiting = mx.depends([*parameters, *rest], [cotangent])
    return waiting[: len(parameters)], *waiting[len(parameters) :]


def _module(head: Any) -> nn.Module:
    owner = head if isinstance(head, nn.Module) else getattr(head, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise ValueError(
            f"linear_cross_entropy: the head must be a module or a bound method of one, got {type(head).__name__}; "
            "the parameters that a plain function closes over would silently get no gradient."
        )
    return owner


def _check(hidden: mx.array, targets: mx.array, weights: mx.array, chunk_tokens: int | None) -> None:
    tokens = tuple(hidden.shape[:-1])
    if hidden.ndim < 1 or math.prod(tokens) < 1:
        raise ValueError(f"linear_cross_entropy: hidden must be [..., D] with a token in it, got {list(hidden.shape)}.")
    for name, array in (("targets", targets), ("weights", weights)):
        if tuple(array.shape) != tokens:
            raise ValueError(f"linear_cross_entropy: {name} must be {list(tokens)}, got {list(array.shape)}.")
    if not mx.issubdtype(targets.dtype, mx.integer):
        raise ValueError(f"linear_cross_entropy: targets must be integers, got {targets.dtype}.")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens must be 1 or more, got {chunk_tokens}.")


def _default_chunk(head: Callable[[mx.array], mx.array], hidden: mx.array) -> int:
    vocabulary = head(hidden[:1]).shape[-1]  # Lazy: only the shape is asked for, nothing is computed.
    row, times = 4 * vocabulary, ON_CUDA if backend.device() == "cuda" else 1
    return max(16, min(times * MOST_BYTES // row, max(times * CHUNK_BYTES // row, times * FEW_TOKENS)))


def _even_bounds(tokens: int, size: int) -> list[int]:
    """Bounds of ceil(tokens / size) chunks of nearly equal length, so that a compiled step sees few shapes."""
    chunks = -(-tokens // size)
    length = -(-tokens // chunks)
    return [*range(0, tokens, length), tokens]
