"""The cross-entropy over the vocabulary, computed for a chunk of tokens at a time, so that no [tokens, vocab] exists.

In training, the gradients of a chunk are computed as soon as its logits exist, so that the head runs once instead of
twice. The backward pass only multiplies them by the cotangent, which is exact because gradients are linear in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from .functional import holding, trainable, with_gradient
from .pointwise import vocabulary_loss
from .pointwise.vocabulary_loss import vocabulary_losses
from .products.quantized_product import unpacked_once
from .random_state import drawing_from, repeatable
from .tracing.turns import Turn, blank, turns

# A chunk's fp32 logits take CHUNK_BYTES, or the bytes of FEWEST_TOKENS tokens if those are more (a few rows would read
# the head's weights for little work), but at most LARGEST_CHUNK_BYTES. MLX works ahead, so several chunks may be alive.
CHUNK_BYTES = 16 * 2**20
LARGEST_CHUNK_BYTES = 128 * 2**20
FEWEST_TOKENS = 128
# How many times larger chunks are on an NVIDIA GPU, where products are fast and the launches would cost more than they.
CHUNK_FACTOR = {"cpu": 1, "metal": 1, "cuda": 4}

# (logits [n, vocabulary], rows [n, ...]) -> [n], in fp32.
Score = Callable[[mx.array, mx.array], mx.array]


def linear_cross_entropy(
    head: nn.Module | Callable[[mx.array], mx.array],
    hidden: mx.array,
    targets: mx.array,
    weights: mx.array,
    *,
    chunk_tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the weighted sum of the tokens' cross-entropies of `head(hidden)`, in nats, and the sum of the weights.

    Gradients reach `hidden` [..., D], `weights` [...] and the head's trainable parameters; frozen parameters cost no
    gradient work. Log-sum-exp and both results are fp32. The head is a module, called as `head(hidden) -> logits [...,
    V]`, or a bound method of one, such as `model.embed_tokens.as_linear`; the logits of a token must depend on that
    token alone. A token of weight 0 does not count, and may have a negative target. `chunk_tokens` tokens make a chunk;
    None chooses by the memory of the logits.

    While every part of the head is in training mode, the forward pass computes the gradients as well. When a part is in
    evaluation mode (`model.eval()`), only a backward pass computes them, so that an evaluation does no gradient work.
    That backward pass runs the head again; a value and a gradient that are evaluated together then hold one chunk each.

    A ValueError says that the shapes disagree, there are no tokens, the targets are not integers, the head is not a
    module or a method of one, or a second derivative is taken.
    """
    _check(hidden, {"targets": targets, "weights": weights}, chunk_tokens)
    _check_integers(targets)
    return linear_scores(head, hidden, mx.maximum(targets.reshape(-1), 0), weights, _losses, chunk_tokens=chunk_tokens)


def linear_scores(
    head: nn.Module | Callable[[mx.array], mx.array],
    hidden: mx.array,
    others: mx.array,
    weights: mx.array,
    score: Score,
    *,
    chunk_tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the weighted sum of the tokens' scores, functions of each token's logits, and the sum of the weights.

    `others` [N, ...] are further arguments of the score, a row for each of the N tokens of hidden [..., D]; they get no
    gradient. `score` maps logits [n, vocabulary] and as many rows of `others` to [n] in fp32. The other arguments, the
    results and errors are those of linear_cross_entropy.
    """
    run = _Head(head)
    _check(hidden, {"weights": weights}, chunk_tokens)
    weights = weights.astype(mx.float32).reshape(-1)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    chunks = _chunks(hidden, chunk_tokens or _default_chunk(head, hidden))
    loss = _loss(run, chunks, run.in_training(), score)(run.parameters, hidden, mx.stop_gradient(others), weights)
    return loss, weights.sum()


def linear_token_losses(
    head: nn.Module | Callable[[mx.array], mx.array],
    hidden: mx.array,
    targets: mx.array,
    *,
    chunk_tokens: int | None = None,
) -> mx.array:
    """Compute each token's cross-entropy of `head(hidden)` in nats, [...] in fp32, for a loss that depends on all.

    Gradients reach `hidden` and the head's trainable parameters. The forward pass of a frozen head in training mode
    computes the gradients of `hidden` as well, since the loss of a token depends on no other row; the backward pass
    multiplies each row by its cotangent. A head that trains runs again in the backward pass. A negative target (-100)
    counts as token 0, and must not count in the loss. Other arguments and errors are those of linear_cross_entropy.
    """
    run = _Head(head)
    _check(hidden, {"targets": targets}, chunk_tokens)
    _check_integers(targets)
    rows = hidden.reshape(-1, hidden.shape[-1])
    chunks = _chunks(rows, chunk_tokens or _default_chunk(head, rows))
    eager = not run.parameters and run.in_training()
    flat = mx.stop_gradient(mx.maximum(targets.reshape(-1), 0))
    with repeatable() as key:
        losses = _token_losses(run, chunks, eager)(mx.stop_gradient(key), run.parameters, rows, flat)
    return losses.reshape(targets.shape)


class _Head:
    """A head that is called with arrays in the place of its trainable parameters."""

    def __init__(self, head: nn.Module | Callable[[mx.array], mx.array]):
        self._head = head
        self.module = _module(head)
        self._paths, self.parameters = trainable(self.module)

    def __call__(self, parameters: list[mx.array], rows: mx.array) -> mx.array:
        with holding(self.module, self._paths, parameters):
            return self._head(rows)

    def in_training(self) -> bool:
        return all(part.training for part in self.module.modules())


def _token_losses(run: _Head, chunks: list[Turn], eager: bool) -> Callable[..., mx.array]:
    """Return the function (key, parameters, hidden, targets) -> losses [N], which has gradients for the middle two.

    `key` is the random key with which the first run of the head begins; a second run draws the same dropout.
    """

    def forward(_key, parameters, hidden, targets):
        ones = mx.ones(targets.shape)
        if eager:
            _, losses, d_hidden, _ = _gradients(run, chunks, parameters, hidden, targets, ones, _losses)
            return losses, d_hidden
        return [_values(run, chunks, parameters, hidden, targets, ones, _losses)[1]]

    def backward(primals, cotangents, outputs):
        d_losses = cotangents[0]
        key, *primals = primals
        if eager:
            _, hidden, targets = primals
            parts = [d_losses[chunk.start : chunk.stop, None] for chunk in chunks]
            d_hidden = _scaled(outputs[1], parts, hidden, chunks)
            return mx.zeros_like(key), [], d_hidden, mx.zeros_like(targets)
        # Waiting for the cotangent keeps MLX from computing these logits before the backward pass needs them.
        parameters, hidden, targets, d_losses = _depends((*primals, d_losses), d_losses)
        with drawing_from(key):
            _, _, d_hidden, d_parameters = _gradients(run, chunks, parameters, hidden, targets, d_losses, _losses)
        cast = [_final(d.astype(parameter.dtype)) for d, parameter in zip(d_parameters, parameters, strict=True)]
        d_hidden = _final(mx.concatenate(d_hidden).astype(hidden.dtype))
        return mx.zeros_like(key), cast, d_hidden, mx.zeros_like(targets)

    return lambda *arguments: with_gradient(forward, backward)(*arguments)[0]


def _loss(run: _Head, chunks: list[Turn], eager: bool, score: Score) -> Callable[..., mx.array]:
    """Return the function (parameters, hidden, targets, weights) -> loss, with gradients for all but the targets."""

    def forward(parameters, hidden, targets, weights):
        if eager:
            return _gradients(run, chunks, parameters, hidden, targets, weights, score)
        return _values(run, chunks, parameters, hidden, targets, weights, score)

    def backward(primals, cotangents, outputs):
        if not eager:
            # Waiting for the cotangent keeps MLX from computing these logits before the backward pass needs them.
            primals = _depends(primals, cotangents[0])
        parameters, hidden, targets, weights = primals
        if not eager:
            outputs = _gradients(run, chunks, parameters, hidden, targets, weights, score)
        _, losses, d_hidden, d_parameters = outputs
        scaled = [_scale(d, cotangents[0], p) for d, p in zip(d_parameters, parameters, strict=True)]
        d_weights = _final(losses * cotangents[0])
        return (
            scaled,
            _scaled(d_hidden, cotangents[:1] * len(chunks), hidden, chunks),
            mx.zeros_like(targets),
            d_weights,
        )

    return lambda *arguments: with_gradient(forward, backward)(*arguments)[0]


def _values(run, chunks, parameters, hidden, targets, weights, score):
    """Return the loss and the losses of the tokens [N], computed one chunk after another."""
    losses: list[mx.array] = []
    with unpacked_once(run.module):
        for start, stop, left_out in chunks:
            if left_out:
                losses.append(blank(losses[-1], stop - start, losses[-1:]))
                continue
            rows = hidden[start:stop]
            if losses:
                rows = mx.depends([rows], [losses[-1]])[0]
            losses.append(score(run(parameters, rows), targets[start:stop]))
    token_losses = mx.concatenate(losses)
    return (token_losses * weights).sum(), token_losses


def _gradients(run, chunks, parameters, hidden, targets, weights, score):
    """Return the loss, the losses of the tokens [N], and the gradients for a cotangent of 1.

    These are d_hidden, a list of the chunks' [n, D], and d_parameters in fp32.
    """
    # Without parameters, the weights multiply the gradient of `rows` instead, which is narrower than the logits.
    weighted = bool(parameters)

    def chunk(differentiated, start, stop):
        nonlocal weighted
        *parameters, rows = differentiated
        logits = run(parameters, rows)
        if score is not _losses or vocabulary_loss.serves(logits):
            weighted = True  # The kernel multiplies by the weights at no cost.
            losses = score(logits, targets[start:stop])
            return (losses * weights[start:stop]).sum(), losses
        loss, losses, _ = _chunk_loss(logits, targets[start:stop], weights[start:stop] if weighted else None)
        return loss, losses

    losses: list[mx.array] = []
    d_rows: list[mx.array] = []
    d_parameters: list[mx.array] = []
    with unpacked_once(run.module):
        for start, stop, left_out in chunks:
            before = [losses[-1], d_rows[-1], *d_parameters] if losses else []
            if left_out:
                d_rows.append(blank(d_rows[-1], stop - start, before))
                losses.append(blank(losses[-1], stop - start, before))
                continue
            rows = hidden[start:stop]
            if losses:
                rows = mx.depends([rows], before)[0]
            (_, chunk_losses), grads = mx.value_and_grad(chunk)([*parameters, rows], start, stop)
            chunk_d_parameters = [grad.astype(mx.float32) for grad in grads[:-1]]
            d = grads[-1]
            if losses:
                d_parameters = [total + part for total, part in zip(d_parameters, chunk_d_parameters, strict=True)]
            else:
                d_parameters = chunk_d_parameters
            d_rows.append(d if weighted else (d * weights[start:stop, None]).astype(d.dtype))
            losses.append(chunk_losses)
    token_losses = mx.concatenate(losses)
    return (token_losses * weights).sum(), token_losses, d_rows, d_parameters


def _losses(logits, targets):
    """Return the losses of a chunk's tokens [n], without a gradient."""
    if vocabulary_loss.serves(logits):
        return vocabulary_losses(logits, targets)
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    return mx.logsumexp(logits, axis=-1) - chosen


def _chunk_forward(logits, targets, weights):
    """Return the weighted sum of the losses (weights None: their sum), the losses [n] and the probabilities [n, V]."""
    logits = logits.astype(mx.float32)
    target_logits = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    probabilities = mx.softmax(logits, axis=-1)
    # Taking the normaliser from the softmax saves the second exponential per logit that logsumexp would compute.
    losses = logits.max(axis=-1) - mx.log(probabilities.max(axis=-1)) - target_logits
    return (losses if weights is None else losses * weights).sum(), losses, probabilities


def _chunk_backward(primals, cotangents, outputs):
    logits, targets, weights = primals
    probabilities = outputs[2]
    # mx.where takes one pass over the chunk; put_along_axis would copy the chunk first.
    is_target = mx.arange(logits.shape[-1])[None] == targets[:, None]
    d_logits = mx.where(is_target, probabilities - 1, probabilities)
    if weights is not None:
        d_logits = d_logits * (weights * cotangents[0])[:, None]
    d_logits = d_logits.astype(logits.dtype)
    return (d_logits, mx.zeros_like(targets), *([] if weights is None else [mx.zeros_like(weights)]))


_chunk_loss = with_gradient(_chunk_forward, _chunk_backward)


def _scale(gradient: mx.array, cotangent: mx.array, like: mx.array) -> mx.array:
    return _final((gradient.astype(mx.float32) * cotangent).astype(like.dtype))


def _refuse(_primal, _cotangent, _output):
    raise ValueError("linear_cross_entropy has no second derivative.")


def _scaled(d_hidden, cotangents, hidden, chunks) -> mx.array:
    """Return the chunks' d_hidden times their cotangents as one array.

    The fp32 product of all tokens at once would take twice the bytes of a 16-bit gradient.
    """
    parts = zip(d_hidden, cotangents, chunks, strict=True)
    return mx.concatenate(
        [d.astype(hidden.dtype) if chunk.left_out else _scale(d, cotangent, hidden) for d, cotangent, chunk in parts]
    )


_final = with_gradient(lambda gradient: gradient, _refuse)


def _depends(primals, cotangent):
    """Return the primals, a list of parameters and three arrays, as arrays that wait for the cotangent."""
    parameters, *others = primals
    waiting = mx.depends([*parameters, *others], [cotangent])
    return waiting[: len(parameters)], *waiting[len(parameters) :]


def _module(head: Any) -> nn.Module:
    owner = head if isinstance(head, nn.Module) else getattr(head, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise ValueError(
            f"linear_cross_entropy: the head must be a module or a bound method of one, got {type(head).__name__}; "
            "the parameters that a plain function closes over would silently get no gradient."
        )
    return owner


def _check_integers(targets: mx.array) -> None:
    if not mx.issubdtype(targets.dtype, mx.integer):
        raise ValueError(f"linear_cross_entropy: targets must be integers, got {targets.dtype}.")


def _check(hidden: mx.array, others: dict[str, mx.array], chunk_tokens: int | None) -> None:
    tokens = tuple(hidden.shape[:-1])
    if hidden.ndim < 1 or math.prod(tokens) < 1:
        raise ValueError(f"linear_cross_entropy: hidden must be [..., D] with a token in it, got {list(hidden.shape)}.")
    for name, array in others.items():
        if tuple(array.shape) != tokens:
            raise ValueError(f"linear_cross_entropy: {name} must be {list(tokens)}, got {list(array.shape)}.")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens must be 1 or more, got {chunk_tokens}.")


def _default_chunk(head: Callable[[mx.array], mx.array], hidden: mx.array) -> int:
    vocabulary = head(hidden[:1]).shape[-1]  # MLX is lazy, so asking for the shape alone computes nothing.
    row_bytes = 4 * vocabulary
    factor = backend.here(CHUNK_FACTOR)
    wanted = max(factor * CHUNK_BYTES // row_bytes, factor * FEWEST_TOKENS)
    return max(16, min(factor * LARGEST_CHUNK_BYTES // row_bytes, wanted))


def _chunks(rows: mx.array, size: int) -> list[Turn]:
    """Return the spans of equal chunks of at most `size` rows, but for the last, so that few shapes are compiled."""
    tokens = len(rows)
    length = -(-tokens // -(-tokens // size))
    # MLX's queue holds the logits of several chunks, and each chunk's place in a task of ten operations is another one.
    # On a CPU the slabs of a product in 16 bits fill the queue.
    ends = 2 if backend.computes_in_fp32() and rows.dtype != mx.float32 else 5
    return turns([*range(0, tokens, length), tokens], ends, ends)
