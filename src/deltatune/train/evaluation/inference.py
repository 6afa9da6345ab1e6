"""Lets a model answer prompts, in inference mode, and names the layer where its numbers are not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from ...data.chats.answers import ending_answers
from ...data.prompts import Question, prompt_tokens
from ...data.vision.media import PromptPictures, media_reader
from ...errors import UserError
from ...models.batch_decoder import ROWS, answer_all
from ...models.generate import Sampling, stream, stream_drafted, stream_with_pictures
from ...models.load import Loaded
from ...models.vocabulary import check_prompt
from ..by_layer.store import Store
from ..setup import vision_processors
from .evaluate import inferring
from .nonfinite import explained


class Prompt(NamedTuple):
    """A prompt to answer; its `text`, small images as data URIs, and the answer of its row are for a report."""

    tokens: Sequence[int]
    pictures: PromptPictures | None = None
    text: str = ""
    expected: str | None = None
    thumbnails: Sequence[str] = ()


class Inference:
    """Answers prompts with a model, adapters included; its mode is restored behind each answer.

    With `chat`, answers end where the chat template ends them, and always at `extra_ends`. `weights` is the store of
    layers that are not in memory. With `draft`, the model's multi-token-prediction head drafts the likeliest answers.
    """

    def __init__(
        self,
        loaded: Loaded,
        sampling: Sampling = Sampling(),  # noqa: B008 (it cannot change)
        *,
        chat: bool = True,
        extra_ends: Sequence[str] = (),
        weights: Store | None = None,
        draft: bool = False,
    ):
        tokenizer = ending_answers(loaded.tokenizer) if chat else loaded.tokenizer
        for token in extra_ends:
            tokenizer.add_eos_token(token)
        self.loaded = dataclasses.replace(loaded, tokenizer=tokenizer)
        self.weights = weights
        self._sampling = sampling
        self._draft = draft

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """mlx-lm's wrapper of the tokenizer."""
        return self.loaded.tokenizer

    def pictures(self, values: Sequence[Any], source: str, folder: Path, options: Mapping[str, Any]) -> PromptPictures:
        """Read the images and videos of a prompt in its order; `options` are those of media_reader().

        Paths are relative to `folder`. A file that cannot be read or does not fit is a UserError, which names `source`.
        """
        processors = vision_processors(self.loaded)
        assert processors is not None
        reader = media_reader(processors, folder, options)
        return PromptPictures.read(values, source, reader, processors.spec, self.tokenizer)

    def prompt(
        self, question: Question, source: str, empty: str, pictures: PromptPictures | None = None, **rendering: Any
    ) -> Prompt:
        """Turn a question into a prompt; `rendering` are further arguments of prompt_tokens().

        A UserError says `empty` where no token is left of it, or names `source` where the model has no row for a token.
        """
        tokens = prompt_tokens(self.tokenizer, question, **rendering)
        if not tokens:
            raise UserError(empty)
        tokens = pictures.placed(tokens, source) if pictures else tokens
        check_prompt(self.model, self.tokenizer, tokens, source)
        return Prompt(tokens, pictures)

    def answer(self, prompt: Prompt, max_tokens: int) -> Generator[Any, None, None]:
        """Answer a prompt piece by piece, at most `max_tokens` tokens.

        Yields the responses of mlx-lm, or of mlx-vlm for a model with a vision tower, each with the `text` of a piece.
        A probability that is not finite raises NoResultError.
        """

        def again(row: Sequence[int]) -> Generator[Any, None, None]:
            return self._pieces(prompt._replace(tokens=row), 1, Sampling())

        with inferring(self.model), explained(self.loaded, self.weights, again):
            yield from self._pieces(prompt, max_tokens, self._sampling)

    def _pieces(self, prompt: Prompt, max_tokens: int, sampling: Sampling) -> Generator[Any, None, None]:
        tokens = prompt.tokens
        pictures = prompt.pictures
        if self._draft:
            return stream_drafted(self.loaded, tokens, max_tokens, sampling)
        if self.loaded.processor is None:
            return stream(self.loaded, tokens, max_tokens, sampling)
        images = pictures.images if pictures else []
        videos = pictures.videos if pictures else []
        return stream_with_pictures(self.loaded, tokens, images, videos, max_tokens, sampling)

    def answer_all(self, prompts: Sequence[Sequence[int]], max_tokens: int, rows: int = ROWS) -> list[list[int]]:
        """Answer several prompts at once, which takes little longer than one; return the answers' tokens without ends.

        `rows` are the most that are continued at a time. A probability that is not finite raises NoResultError.
        """
        with inferring(self.model), explained(self.loaded, self.weights):
            if prompts:
                self.try_token(prompts[0])
            return answer_all(
                self.model,
                self.tokenizer,
                prompts,
                max_tokens=max_tokens,
                sampler=self._sampling.sampler(),
                rows=rows,
                compiled=self.weights is None,
            )

    def try_token(self, tokens: Sequence[int]) -> None:
        """Compute the likeliest token behind a prompt; NotFiniteError where its probability is not finite."""
        for _ in self._pieces(Prompt(tokens), 1, Sampling()):
            pass
