"""Continues many prompts by mlx-lm's BatchGenerator: for models with caches of kinds that BatchDecoder lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from ..errors import NotFiniteError
from ..machine import backend
from ..machine.host_memory import as_numpy
from .batch_decoder import PROMPT_TOKENS, Answer, Chooser, Stops


def can_be_joined(model: nn.Module) -> bool:
    """Whether mlx-lm joins the caches of several rows of a model, which is one of its own."""
    of_mlx_lm = type(model).__module__.startswith("mlx_lm.")
    return of_mlx_lm and all(hasattr(cache, "merge") for cache in make_prompt_cache(model))


class AnswerGenerator:
    """Continues prompts, so many at a time, until each has ended; its answers are those of BatchDecoder.

    `figures` returns the figures [F, B] of tokens [B] by log-probabilities of the model [B, V], as a chooser returns
    them behind the tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        ends: Collection[int],
        max_tokens: int,
        figures: Callable[[mx.array, mx.array], mx.array],
    ):
        self._model = model
        self._rows = rows
        self._ends = frozenset(ends)
        self._max_tokens = max_tokens
        self._figures = figures

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        choose: Chooser,
        between: Callable[[], None] | None = None,
        stops: Stops | None = None,
    ) -> list[Answer]:
        """Return the answer to each prompt, as BatchDecoder.answers() does."""
        answers = [Answer(prompt) for prompt in prompts]
        longest = max(map(len, prompts), default=1)
        generator = BatchGenerator(
            self._model,
            max_tokens=self._max_tokens,
            stop_tokens=[[end] for end in self._ends],
            sampler=lambda log_probabilities: choose(log_probabilities).tokens,
            completion_batch_size=self._rows,
            prefill_batch_size=max(1, min(self._rows, backend.here(PROMPT_TOKENS) // longest)),
        )
        waiting = dict(zip(generator.insert([list(prompt) for prompt in prompts]), answers, strict=True))
        with contextlib.closing(generator):
            while waiting:
                if between is not None:
                    between()
                responses = generator.next_generated()
                rows = [waiting[response.uid] for response in responses]
                tokens = mx.array([response.token for response in responses])
                figures = as_numpy(self._figures(mx.stack([response.logprobs for response in responses]), tokens))
                if not np.isfinite(figures).all():
                    raise NotFiniteError(*([*row.prompt, *row.tokens] for row in rows))
                for row, response, of_token in zip(rows, responses, figures.T, strict=True):
                    row.take(response.token, of_token.tolist(), self._ends, stops)
                    if row.stopped and response.finish_reason is None:
                        generator.remove([response.uid])
                    if row.stopped or response.finish_reason is not None:
                        del waiting[response.uid]
        return answers
