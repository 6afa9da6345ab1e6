"""Samples the answers of a run, by one compiled engine for all of it.

Answers to a prompt with pictures are sampled together, so that the prompt and its tower are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...data.example import Example
from ...data.vision.media import collate_pictures
from ...errors import NotFiniteError, UserError
from ...machine.compiling import without_kernels
from ...machine.host_memory import as_numpy
from ...models.batch_decoder import (
    ROWS,
    Answer,
    AnswerGenerator,
    BatchDecoder,
    Chooser,
    Stops,
    can_be_joined,
    has_row_caches,
)
from ...models.generate import SampledPolicy
from ...models.layer_caches import empty_caches, repeat_row
from ...models.load import Loaded
from ...models.vision.split import frozen_tower, has_vision, split_vision, vision_arrays
from ...options.config import TrainConfig
from ..evaluation.evaluate import inferring
from ..evaluation.nonfinite import explained


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


@dataclass(frozen=True)
class SampledAnswers:
    """N sampled answers of at most M tokens, their ends included: int32 [N, M] and lengths [N]. Behind an answer are 0.

    `ended` [N] says whether one ended by itself: by an end token or a text at which it stops. The log-probabilities
    of the tokens, and the entropies of their distributions without top_p, top_k and min_p, are float32 [N, M].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    log_probabilities: np.ndarray
    entropies: np.ndarray


class AnswerSampler:
    """Samples answers to prompts with a model that trains, within patched(); check_covered() has let it pass.

    At most `rows` answers are sampled together, in caches of `positions`, the most of a prompt with its answer.
    `between` is called between two tokens, and may leave the sampling by an error.
    """

    def __init__(self, loaded: Loaded, config: TrainConfig, rows: int, positions: int, between: Callable[[], None]):
        self._loaded = loaded
        self._config = config
        self._policy = SampledPolicy.of(config, loaded.model)
        self._stops = stops_at(config.stop_strings, loaded.tokenizer.decode)
        self._between = between
        # An answer's last token is sampled, and one more may be under way.
        self._room = positions + 2
        self._rows = min(ROWS, rows)
        self._engine: BatchDecoder | AnswerGenerator | PictureSampler | None = None

    def __call__(self, prompts: Sequence[Example], key: mx.array) -> SampledAnswers:
        """Sample `config.rows_each` answers to each prompt, one prompt after the other; they depend on `key`.

        A probability that is not finite raises NoResultError.
        """
        loaded = self._loaded
        model = loaded.model
        # A row holds at least a token of the prompt.
        most = min(self._config.max_completion_length, self._config.max_seq_length - 1)
        rows = [tokens for prompt in prompts for tokens in [prompt.tokens.tolist()] * self._config.rows_each]
        choose = self._policy.sampler(key)
        with inferring(model), explained(loaded), without_kernels():
            if self._engine is None:
                self._engine = self._engine_of(model, most)
            if isinstance(self._engine, PictureSampler):
                answers = self._engine.answers(prompts, self._config.rows_each, choose, self._between, self._stops)
            else:
                answers = self._engine.answers(rows, choose, self._between, self._stops)
        tokens = np.zeros((len(rows), most), np.int32)
        figures = np.zeros((2, len(rows), most), np.float32)
        lengths = np.array([len(answer.figures) for answer in answers], np.int32)
        for row, answer in enumerate(answers):
            ends_with = [] if answer.end is None else [answer.end]
            tokens[row, : lengths[row]] = [*answer.tokens, *ends_with]
            figures[:, row, : lengths[row]] = np.array(answer.figures, np.float32).T
        ended = np.array([answer.ended for answer in answers], bool)
        return SampledAnswers(tokens, lengths, ended, *figures)

    def _engine_of(self, model: Any, most: int) -> BatchDecoder | AnswerGenerator | PictureSampler:
        ends = self._loaded.tokenizer.eos_token_ids
        if has_vision(model):
            return PictureSampler(model, ends, most)
        if has_row_caches(model):
            return BatchDecoder(model, self._rows, ends, most, room=self._room, trains=True)
        return AnswerGenerator(model, self._rows, ends, most, self._policy.figures)

    def texts(self, answers: SampledAnswers) -> list[str]:
        """Return the texts of answers, without their end tokens."""
        last = answers.tokens[np.arange(len(answers.tokens)), answers.lengths - 1]
        lengths = answers.lengths - np.isin(last, list(self._loaded.tokenizer.eos_token_ids))
        return [self.text(tokens[:length]) for tokens, length in zip(answers.tokens, lengths, strict=True)]

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of tokens, without special ones."""
        return self._loaded.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


def stops_at(texts: Sequence[str], decode: Callable[[list[int]], str]) -> Stops | None:
    """Return whether an answer has one of `texts`, the last token completing it; None without texts."""
    if not texts:
        return None
    # Each token is a byte of the text at least. A decoder may drop a space before the first one.
    most = max(len(text.encode()) for text in texts) + 1

    def stops(tokens: Sequence[int]) -> bool:
        end = decode(list(tokens[-most:]))
        return any(text in end for text in texts)

    return stops


def check_covered(model: Any, config: TrainConfig) -> None:
    """Refuse a model that the engine does not cover, by a UserError."""
    if not can_be_joined(model) and not has_vision(model):
        name = f"{type(model).__module__}.{type(model).__name__}"
        remedy = " Give lmbda: 0 to learn from the answers of the data alone." * (config.loss == "distill")
        raise UserError(
            f"loss: {config.loss} samples answers to many prompts at once, which {name} cannot yet: it takes a "
            f"language model of mlx-lm with caches that can be joined.{remedy}"
        )
