"""Lets a model answer prompts, in inference mode, and names the layer where its numbers are not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from ...data.chats.answer_ends import ending_answers
from ...data.prompts import Question, prompt_tokens
from ...data.vision.media import media_reader
from ...data.vision.prompt import PromptPictures
from ...errors import UserError
from ...models.batch_decoder import ROWS, answer_all
from ...models.drafts import stream_drafted
from ...models.generate import Sampling, stream, stream_with_pictures
from ...models.load import Loaded
from ...models.vocabulary import check_prompt
from ..by_layer.store import Store
from ..setup import vision_processors
from .evaluate import inferring
from .nonfinite import explained


class Prompt(NamedTuple):
    """A prompt to answer.

    Attributes:
        tokens: Its tokens.
        pictures: Its images and videos; None without.
        text: Its text, as a report shows it.
        expected: The answer of its row, as the chat template writes it; None without one.
        thumbnails: Its images, small, as data URIs.
    """

    tokens: Sequence[int]
    pictures: PromptPictures | None = None
    text: str = ""
    expected: str | None = None
    thumbnails: Sequence[str] = ()


class Inference:
    """Answers prompts with a model; its mode is restored behind each answer.

    Args:
        loaded: The model and its tokenizer; adapters that it has count.
        sampling: How each token is chosen.
        chat: Whether answers end where the chat template ends them, too.
        extra_ends: Further tokens that end an answer.
        weights: The store from which the model's layers read their weights; None where all stay in memory.
        draft: Whether the model's multi-token-prediction head drafts answers.

    Attributes:
        loaded: The model, and its tokenizer with these ends.
        weights: The store.
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
        """Read the images and videos of a prompt.

        Args:
            values: The files, in the order of the prompt.
            source: The place that gave them, for messages to the user.
            folder: The folder to which relative paths refer.
            options: The options of images and videos, as media_reader() takes them.

        Raises:
            UserError: A file cannot be read, or is of an unfit kind.
        """
        processors = vision_processors(self.loaded)
        assert processors is not None
        reader = media_reader(processors, folder, options)
        return PromptPictures.read(values, source, reader, processors.spec, self.tokenizer)

    def prompt(
        self, question: Question, source: str, empty: str, pictures: PromptPictures | None = None, **rendering: Any
    ) -> Prompt:
        """Turn a question into a prompt.

        Args:
            question: The question.
            source: The place that gave it, for messages to the user.
            empty: The message where no token is left of it.
            pictures: Its images and videos.
            rendering: Further arguments of prompt_tokens().

        Raises:
            UserError: No token is left of it, or the model has no row for one.
        """
        tokens = prompt_tokens(self.tokenizer, question, **rendering)
        if not tokens:
            raise UserError(empty)
        tokens = pictures.placed(tokens, source) if pictures else tokens
        check_prompt(self.model, self.tokenizer, tokens, source)
        return Prompt(tokens, pictures)

    def answer(self, prompt: Prompt, max_tokens: int) -> Generator[Any, None, None]:
        """Answer a prompt piece by piece.

        Args:
            prompt: The prompt.
            max_tokens: The largest number of tokens in the answer.

        Yields:
            The responses of mlx-lm, or of mlx-vlm for a model with a vision tower, each with the `text` of a piece.

        Raises:
            NoResultError: The probability of a token is not finite.
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
        """Answer several prompts at once, which takes little longer than one.

        Args:
            prompts: The tokens of each prompt.
            max_tokens: The largest number of tokens in an answer.
            rows: The largest number of prompts that are continued at a time.

        Returns:
            The tokens of each answer, without the one that ended it.

        Raises:
            NoResultError: The probability of a token is not finite.
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
