"""Answers many prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm import batch_generate

from ..machine import backend
from ..machine.compiling import without_kernels
from ..patches import patched
from .batch_decoder import BatchDecoder, Sampler, is_covered

# How many prompts are continued at a time.
ROWS = 128
# The same for mlx-lm's generation, by device; ROWS on other devices. On CUDA, MLX's rotary embedding of one token fails
# for larger batches of models with few rotated pairs, such as the demo's.
_ROWS_OF_MLX_LM = {"cuda": 32}


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
    """
    model.eval()
    # Building kernels would take longer than all the answers of an evaluation take without them.
    with without_kernels(), patched():
        if is_covered(model):
            rows = min(rows, len(prompts))
            decoder = BatchDecoder(model, rows, tokenizer.eos_token_ids, max_tokens, sampler, compiled=compiled)
            return decoder.run(prompts)
        batch_size = min(rows, _ROWS_OF_MLX_LM.get(backend.device(), ROWS))
        response = batch_generate(
            model,
            tokenizer,
            [list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            sampler=sampler,
            completion_batch_size=batch_size,
            prefill_batch_size=batch_size,
            return_token_ids=True,
        )
    assert response.token_ids is not None
    return response.token_ids
