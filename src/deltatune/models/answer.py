"""Answers prompts with mlx-lm's generation, always taking the likeliest token: many at once, or one by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm import batch_generate, stream_generate

from ..machine import backend
from ..machine.compiling import without_kernels
from ..patches import patched

# Prompts in a batch, by device; _LARGEST_BATCH on other devices. On CUDA, MLX's rotary embedding of one token fails for
# larger batches of models with few rotated pairs, such as the demo's.
_BATCH_SIZES = {"cuda": 32}
_LARGEST_BATCH = 128


def answer_all(model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[str]:
    """Continue each prompt with the likeliest token at every step, until the model ends its answer.

    Args:
        model: The model. It is left in inference mode.
        tokenizer: mlx-lm's wrapper of its tokenizer.
        prompts: The tokens of each prompt. Lengths may differ.
        max_tokens: The largest number of tokens in an answer.

    Returns:
        The text of each answer.
    """
    model.eval()
    batch_size = _BATCH_SIZES.get(backend.device(), _LARGEST_BATCH)
    # Building kernels would take longer than all the answers of an evaluation take without them.
    with without_kernels(), patched():
        response = batch_generate(
            model,
            tokenizer,
            [list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            completion_batch_size=batch_size,
            prefill_batch_size=batch_size,
        )
    return response.texts


def answer_one(
    model: nn.Module, tokenizer: Any, prompt: Sequence[int], *, max_tokens: int, ended: Callable[[], bool]
) -> str | None:
    """Continue a prompt as answer_all does; no random number is drawn.

    Args:
        model: The model, in inference mode.
        tokenizer: mlx-lm's wrapper of its tokenizer.
        prompt: The tokens of the prompt.
        max_tokens: The largest number of tokens in the answer.
        ended: Is called after each token; True ends the generation.

    Returns:
        The text of the answer, or None if `ended` ended it.
    """
    parts: list[str] = []
    with without_kernels(), patched():
        for piece in stream_generate(model, tokenizer, list(prompt), max_tokens=max_tokens):
            parts.append(piece.text)
            if ended():
                return None
    return "".join(parts)
