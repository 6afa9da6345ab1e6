"""Scores continuations of texts: how likely a model finds them, and whether it would have written them itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..errors import NotFiniteError
from ..layers import logits_of
from .head import Split

# Logits are computed of so many tokens at a time: over a large vocabulary, those of a whole text would take gigabytes.
PIECE = 256


class Likelihood(NamedTuple):
    """How likely a continuation is.

    Attributes:
        total: Its log-likelihood.
        greedy: Whether each of its tokens is the likeliest.
    """

    total: float
    greedy: bool


def scored(model: nn.Module, split: Split, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Likelihood]:
    """Score the last `counts` tokens of each row of tokens.

    Args:
        model: The model.
        split: Its parts, by which logits are computed for the tokens alone that are scored.
        rows: The tokens of each text and its continuation.
        counts: How many of them are the continuation's.

    Raises:
        NotFiniteError: A log-likelihood is not finite.
    """
    width = max(map(len, rows)) - 1
    tokens = mx.array([[*row[:-1], *[0] * (width + 1 - len(row))] for row in rows], mx.int32)
    outputs = before_head(model, split, tokens)
    scores = []
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        total, greedy = 0.0, True
        for start in range(len(row) - 1 - count, len(row) - 1, PIECE):
            end = min(start + PIECE, len(row) - 1)
            pieces = of_piece(split, outputs[number, start:end], mx.array(list(row[start + 1 : end + 1]), mx.int32))
            mx.eval(pieces)
            total, greedy = total + float(pieces[0]), greedy and bool(pieces[1].item())
        if not math.isfinite(total):
            raise NotFiniteError(row)
        scores.append(Likelihood(total, greedy))
    return scores


def before_head(model: nn.Module, split: Split, tokens: mx.array) -> mx.array:
    """Return the hidden states of tokens [B, T] behind the layers, or the logits of a model that cannot be split."""
    return logits_of(model, tokens) if split.backbone is None else split.backbone(tokens)


def of_piece(split: Split, outputs: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return the log-likelihood of targets [T], and whether all are the likeliest, from outputs of before_head()."""
    logits = (outputs if split.head is None else split.head(outputs)).astype(mx.float32)
    of_targets = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
    return of_targets.sum(), (logits.argmax(axis=-1) == targets).all()
