"""Answers many prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import batch_generate

from ..errors import NotFiniteError
from ..machine import backend
from ..machine.compiling import without_kernels
from ..patches import patched
from .batch_decoder import BatchDecoder, Sampler, is_covered

# How many prompts are continued at a time.
ROWS = 128
# The same for mlx-lm's generation, by device; ROWS on other devices. On CUDA, MLX's rotary embedding of one token fails
# for larger batches of models with few rotated pairs, such as the demo's.
_ROWS_OF_MLX_LM = {"cuda": 32}


class _CheckedSampler:
    """Chooses tokens as `sampler` does, by default the likeliest, and keeps whether all had finite log-probabilities.

    Attributes:
        healthy: Whether they had, [] bool.
    """

    def __init__(self, sampler: Sampler | None):
        self._sampler = sampler
        self.healthy = mx.array(True)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Return a token for each row of log-probabilities [B, V]."""
        tokens = logprobs.argmax(axis=-1) if self._sampler is None else self._sampler(logprobs)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)
        self.healthy = self.healthy & mx.isfinite(chosen).all()
        # Computed with the tokens, it holds no log-probabilities.
        return mx.depends([tokens], [self.healthy])[0]


def answer_all(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    rows: int = ROWS,
    compiled: bool = True,
) -> list[list[int]]:
    """Continue each prompt until the model ends its answer.

    Args:
        model: The model. It is left in inference mode.
        tokenizer: mlx-lm's wrapper of its tokenizer.
        prompts: The tokens of each prompt. Lengths may differ.
        max_tokens: The largest number of tokens in an answer.
        sampler: Chooses a token for each row from its log-probabilities [B, V]; by default the likeliest.
        rows: How many prompts are continued at a time, at most.
        compiled: Whether a step may be compiled, which layers that read their weights cannot be.

    Returns:
        The tokens of each answer, without the one that ended it.

    Raises:
        NotFiniteError: The probability of a token is not finite.
    """
    model.eval()
    # Building kernels would take longer than all the answers of an evaluation take without them.
    with without_kernels(), patched():
        if is_covered(model):
            rows = min(rows, len(prompts))
            decoder = BatchDecoder(model, rows, tokenizer.eos_token_ids, max_tokens, sampler, compiled=compiled)
            return decoder.run(prompts)
        checked = _CheckedSampler(sampler)
        batch_size = min(rows, backend.here(_ROWS_OF_MLX_LM, ROWS))
        response = batch_generate(
            model,
            tokenizer,
            [list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            sampler=checked,
            completion_batch_size=batch_size,
            prefill_batch_size=batch_size,
            return_token_ids=True,
        )
    assert response.token_ids is not None
    if not checked.healthy.item():
        raise NotFiniteError(*([*row, *answer] for row, answer in zip(prompts, response.token_ids, strict=True)))
    return response.token_ids
