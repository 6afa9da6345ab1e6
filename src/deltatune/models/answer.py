"""Greedy answers to many prompts at once: mlx-lm's batched generation, behind one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm import batch_generate


def answer_all(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int, batch_size: int = 128
) -> list[str]:
    """The model's likeliest continuation of each prompt, token by token, up to its end or `max_tokens`.

    prompts: tokens, of any lengths. Leaves `model` in inference mode.
    """
    model.eval()
    response = batch_generate(
        model,
        tokenizer,
        [list(prompt) for prompt in prompts],
        max_tokens=max_tokens,
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
    )
    return response.texts
