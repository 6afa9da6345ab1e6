"""Greedy answers to many prompts at once: mlx-lm's batched generation, behind one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm import batch_generate

from ..machine import backend
from ..machine.compiling import without_kernels
from ..patches import patched

# MLX's rope on CUDA cannot launch for one token of more rows of heads where few pairs turn, as in the demo's model.
BATCH = {"cuda": 32}


def answer_all(model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[str]:
    """The model's likeliest continuation of each prompt, token by token, up to its end or `max_tokens`.

    prompts: tokens, of any lengths. Leaves `model` in inference mode.
    """
    model.eval()
    batch_size = BATCH.get(backend.device(), 128)
    # Kernels would take longer to build than all the answers of an evaluation take without.
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
