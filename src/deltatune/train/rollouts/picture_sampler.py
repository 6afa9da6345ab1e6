"""Samples answers to prompts with pictures: those to one prompt at once, which is read once, with its tower."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...data.example import Example
from ...data.vision.media import collate_pictures
from ...errors import NotFiniteError
from ...machine.numpy_arrays import as_numpy
from ...models.batch_decoder import Answer, Chooser, Stops
from ...models.layer_caches import empty_caches, repeat_row
from ...models.vision.split import frozen_tower, split_vision, vision_arrays


class PictureSampler:
    """Continues prompts of a vision model by the forward pass of its training, one token of all rows at a time."""

    def __init__(self, model: Any, ends: Collection[int], max_tokens: int):
        self._language = model.language_model
        self._split = split_vision(model, compare=False)
        # Each prompt is read once, so that no features are kept.
        self._tower = frozen_tower(model, 0)
        self._ends = ends
        self._max_tokens = max_tokens

    def answers(
        self,
        prompts: Sequence[Example],
        rows: int,
        choose: Chooser,
        between: Callable[[], None],
        stops: Stops | None = None,
    ) -> list[Answer]:
        """Return so many answers to each prompt, those to a prompt one after the other.

        `between` is called between two tokens; `stops` ends answers beside their end tokens. A logit that is not finite
        raises NotFiniteError.
        """
        return [answer for prompt in prompts for answer in self._to_one(prompt, rows, choose, between, stops)]

    def _to_one(
        self, prompt: Example, rows: int, choose: Chooser, between: Callable[[], None], stops: Stops | None
    ) -> list[Answer]:
        assert prompt.pictures is not None
        answers = [Answer(prompt.tokens.tolist()) for _ in range(rows)]
        caches = empty_caches(self._language)
        # A row of a batch is one position shorter than its document.
        whole = prompt.answered(np.zeros(1, np.int32))
        pictures = vision_arrays(collate_pictures([whole], len(prompt.tokens), prompt.pictures.spec), self._tower)
        logits = self._logits(mx.array(prompt.tokens[None]), pictures, caches)
        mx.eval(logits, [cache.state for cache in caches])
        repeat_row(caches, rows)
        logits = mx.repeat(logits, rows, axis=0)
        position = int(prompt.pictures.positions.max())
        while True:
            chosen = choose(logits)
            figures = as_numpy(chosen.figures)
            if not np.isfinite(figures).all():
                raise NotFiniteError(*([*answer.prompt, *answer.tokens] for answer in answers))
            for answer, (token, *of_token) in zip(answers, figures.T.tolist(), strict=True):
                if not answer.ended:
                    answer.take(int(token), of_token, self._ends, stops)
            if all(answer.ended or len(answer.figures) == self._max_tokens for answer in answers):
                return answers
            between()
            position += 1
            positions = mx.full((3, rows, 1), position, mx.int32)
            logits = self._logits(chosen.tokens[:, None], {"positions": positions}, caches)

    def _logits(self, tokens: mx.array, images: dict[str, Any], caches: list[Any]) -> mx.array:
        """Return the logits [B, V] behind tokens [B, T]."""
        return self._split.head(self._split.backbone(tokens, images, cache=caches)[:, -1:])[:, -1]
