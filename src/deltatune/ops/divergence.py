"""The divergence between two models' distributions over the vocabulary, a chunk of tokens at a time.

Temperature T divides both models' logits. With p the student's distribution, q the teacher's and m = beta q +
(1 - beta) p, the generalised Jensen-Shannon divergence of a token is beta KL(q || m) + (1 - beta) KL(p || m) (Agarwal
et al. 2024, arXiv:2306.13649, eq. 1). Its limits, divided by beta and 1 - beta, are beta = 0, the forward divergence
KL(q || p), and beta = 1, the reverse one, KL(p || q).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .cross_entropy import linear_scores
from .products.quantized_product import unpacked_once


def divergence(logits: mx.array, teacher_logits: mx.array, beta: float, temperature: float) -> mx.array:
    """Return the divergence in nats, [N] in fp32, of each token of the student's and the teacher's logits [N, V].

    beta goes from 0, forward, to 1, reverse; the temperature divides both models' logits.
    """
    student, teacher = (_log_softmax(x.astype(mx.float32) / temperature) for x in (logits, teacher_logits))
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = mx.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _kl(p: mx.array, q: mx.array) -> mx.array:
    """Return KL(p || q) of log-probabilities [N, vocabulary]."""
    return (mx.exp(p) * (p - q)).sum(axis=-1)


def linear_divergence(
    head: nn.Module | Callable[[mx.array], mx.array],
    hidden: mx.array,
    teacher: tuple[nn.Module, mx.array],
    weights: mx.array,
    *,
    beta: float,
    temperature: float,
    chunk_tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the weighted sum of the tokens' divergences, and the sum of the weights, fp32 scalars.

    Gradients reach `hidden`, `weights` and the head's trainable parameters as in linear_cross_entropy, with which this
    shares its chunks and errors. No logits of all tokens exist, of either model. `teacher` is its head and its hidden
    states [..., E] of the tokens of hidden [..., D]; they get no gradient. beta and temperature are those of
    divergence().
    """
    teacher_head, teacher_hidden = teacher
    rows = mx.stop_gradient(teacher_hidden.reshape(-1, teacher_hidden.shape[-1]))

    def score(logits: mx.array, teacher_rows: mx.array) -> mx.array:
        return divergence(logits, mx.stop_gradient(teacher_head(teacher_rows)), beta, temperature)

    with unpacked_once(teacher_head):
        return linear_scores(head, hidden, rows, weights, score, chunk_tokens=chunk_tokens)
