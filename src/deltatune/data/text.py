"""Turns rows of data (texts, prompts with completions, conversations, and their pictures) into examples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..models.vision.inputs import VisionSpec, single_frames, token_positions
from ..options.values import THINKING, nearest
from ..upstream import hugging_face_tokenizer
from .chats.chat import ChatTokenizer, encoded
from .chats.rendering import ChatRow, Item, Lost, Rendered, Renderer
from .chats.template_probes import REASONING
from .example import PART, Example
from .rows.row_formats import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    TOOL_CALLS,
    Conversation,
    Features,
    Messages,
    PlainText,
    RowFormats,
    join_text_parts,
    template_options_of,
    tools_of,
)
from .rows.unread_columns import MARKED_TURNS, MARKS_IN_TEXT, counts
from .vision.media import MediaReader, MediaSize, Pictures, token_counts
from .vision.messages import has_mark_in_text, media_kind, place_media, write_videos
from .vision.videos import video_names, video_text


class PlacedMedium(NamedTuple):
    """An image or video of a row: the number of its message, its value as the row gives it, and its size."""

    message: int
    value: Any
    size: MediaSize


class MediaPlacer:
    """Puts the images and videos of rows into their messages, and into the examples of these.

    The content of a message is a string with the marks "<image>" and "<video>", or a list of parts such as {"type":
    "text", "text": ...}, {"type": "image"} and {"type": "video"}. The files come from the parts themselves ("image":
    PATH), or in order from the row's "images" (or "image") and "videos" (or "video").
    """

    def __init__(self, spec: VisionSpec, reader: MediaReader, tokenizer: Any):
        self._spec = spec
        self._reader = reader
        self._names = video_names(tokenizer, spec)

    def place(self, row: Mapping[str, Any], messages: Messages, source: str) -> tuple[Messages, list[PlacedMedium]]:
        """Return a row's messages with a part for each image, and the text of each video; and these in order.

        A UserError, naming `source`, says that a file cannot be read, or that places and files do not match.
        """
        messages, values = place_media(messages, row, source)
        media = [PlacedMedium(number, value, self._reader.read(value, source)[1]) for number, value in values]
        texts = [video_text(medium.size.seconds, self._names) for medium in media if medium.size.seconds]
        return write_videos(messages, texts), media

    def with_pictures(self, example: Example, media: Sequence[PlacedMedium]) -> Example:
        """Return the example with each image and video token repeated once for each of its features.

        A UserError says that the tokens are not those of the media, or that no text is left to predict.
        """
        spec, source = self._spec, example.source
        sizes = [medium.size for medium in media]
        grids = tuple(size.grid for size in sizes)
        repeats = token_counts(example.tokens, sizes, spec, source)
        tokens, targets = np.repeat(example.tokens, repeats), np.repeat(example.targets, repeats)
        targets[np.isin(tokens, (spec.image_token, spec.video_token))] = False
        if tokens[-1] in (spec.image_token, spec.video_token):
            raise UserError(
                f"{source}: the row ends with an image, after which there is nothing to predict; add an answer in text."
            )
        if example.targets.any() and not targets.any():
            raise UserError(f"{source}: nothing to learn from: only image tokens would count; add an answer in text.")
        values = tuple(medium.value for medium in media)
        digests = tuple(self._reader.digest(value, source) for value in values)
        positions = token_positions(tokens, single_frames(grids), spec)
        pictures = Pictures(values, grids, digests, positions, spec, self._reader)
        return replace(example, tokens=tokens.astype(np.int32), targets=targets, pictures=pictures)


class TextEncoder:
    """Turns rows into examples with one tokenizer and one loss rule; mlx_lm.tuner.datasets gives the same tokens.

    With `mask_prompt` False every token counts in the loss. None and True leave prompts out; True also refuses plain
    text, which has none. With `last_turn` the last assistant turn of a conversation counts alone. `template_options`
    are variables for the chat template, which those of a row override. `media` places images and videos, for a model
    with a vision tower; None refuses rows that have some. `formats`, `unwritten` and `prompts` count as Encoded says.
    """

    def __init__(
        self,
        tokenizer: Any,
        features: Features,
        mask_prompt: bool | None,
        *,
        last_turn: bool = False,
        template_options: Mapping[str, Any] | None = None,
        media: MediaPlacer | None = None,
    ):
        self._tokenizer = tokenizer
        self._mask_prompt = mask_prompt
        self._last_turn = last_turn
        self._media = media
        self.formats = RowFormats(features)
        self._renderer = Renderer(tokenizer, template_options)
        self._chats = ChatTokenizer(tokenizer)
        self._thinking = self._renderer.options[THINKING]
        self.unwritten = Counter[str]()
        self._before: Conversation | None = None
        self.prompts = Counter[bool]()

    def __call__(self, row: Any, source: str) -> list[Example]:
        """Return the row's examples at full length; UserError, naming `source`, if it cannot be trained on."""
        return next(self.stream(iter([(source, row)]), 1))

    def stream(self, rows: Iterable[tuple[str, Any]], count: int) -> Iterator[list[Example]]:
        """Yield the examples of each row, in order; `count` is about how many rows there are."""
        failures: list[UserError] = []
        for chunk in self._renderer.chunks(self._until_failure(rows, failures), count):
            yield from self._examples(chunk)
        # Rows are read ahead: the rows before a bad one come first, and with them their own mistakes.
        if failures:
            raise failures[0]

    def _conversation(
        self, messages: Messages, media: Sequence[PlacedMedium], row: Mapping[str, Any], source: str
    ) -> Conversation:
        if not self._tokenizer.has_chat_template:
            raise UserError(
                f"{source}: the model's tokenizer has no chat template, which prompt/completion and chat lines need; "
                'use an instruction-tuned model, or lines of the form {"text": ...}.'
            )
        turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        counted = [index for index in turns if counts(messages[index], index + 1, source)]
        tools, options = tools_of(row, source), template_options_of(row, source)
        check_template(messages, self._renderer.template(tools), source)
        every = self._mask_prompt is False
        if self._last_turn and not every:
            counted = counted[-1:]
        check_answers(messages, turns if every else counted, source)
        if every:
            self.formats.unread[MARKED_TURNS] += len(turns) > len(counted)
            return Conversation(messages, tools, None, False, source, options, media)
        return Conversation(messages, tools, counted, counted == turns, source, options, media)

    def _until_failure(self, rows: Iterable[tuple[str, Any]], failures: list[UserError]) -> Iterator[Item]:
        """Yield the text or conversation of each row, up to the first unreadable one; its error goes to `failures`."""
        try:
            for source, row in rows:
                messages, media = self._placed(row, source)
                if messages is None:
                    yield self.formats.text(row, source)
                else:
                    yield self._conversation(messages, media, row, source)
        except UserError as error:
            failures.append(error)

    def _placed(self, row: Any, source: str) -> tuple[Messages | None, Sequence[PlacedMedium]]:
        """Return the messages of a row as the template takes them, None for plain text, and its images and videos."""
        messages = self.formats.messages(row, source)
        if self._media is not None and messages is not None:
            messages, media = self._media.place(row, messages, source)
            self.formats.unread[MARKS_IN_TEXT] += has_mark_in_text(messages)
            return messages, media
        kind = media_kind(row, messages or [])
        if kind and self._media is not None:
            raise UserError(f"{source}: a text line has no place for {kind}s; use messages or prompt/completion.")
        if kind:
            raise UserError(
                f"{source}: this row has {kind}s, and the model was loaded without its vision tower; images and videos "
                "cannot be streamed, so leave streaming out, or remove the row."
            )
        return messages and join_text_parts(messages, source), ()

    def _examples(self, chunk: list[Rendered]) -> Iterator[list[Example]]:
        plain = iter(self._encode_texts([item.text for item, *_ in chunk if isinstance(item, PlainText)]))
        written = [row.text for _, rows, _ in chunk if not isinstance(rows, UserError) for row in rows]
        tokens = iter(self._chats.encode(written))
        for item, rows, lost in chunk:
            if isinstance(rows, UserError):
                raise rows
            if isinstance(item, PlainText):
                yield [self._text_example(item, next(plain))]
            else:
                self._count(item, lost)
                yield [self._chat_example(item, row, next(tokens), len(rows)) for row in rows]

    def _count(self, conversation: Conversation, lost: Sequence[Lost]) -> None:
        """Count the parts of a conversation that are lost; both of a pair have one source, and share their prompt."""
        before = self._before
        shared = [] if before is None or before.source != conversation.source else before.messages
        self.unwritten.update(
            kind
            for kind, message in lost
            if not shared or (message is not None and shared[message : message + 1] != [conversation.messages[message]])
        )
        self._before = conversation

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        inner = hugging_face_tokenizer(self._tokenizer)
        if not texts or type(inner).encode is not PreTrainedTokenizerBase.encode:
            return [self._tokenizer.encode(text) for text in texts]
        return encoded(inner, texts, specials=True)

    def _text_example(self, item: PlainText, tokens: list[int]) -> Example:
        if self._mask_prompt:
            raise UserError(
                f"{item.source}: --mask-prompt leaves prompts out of the loss, and a text line has none; "
                "remove the flag, or use prompt/completion or chat lines."
            )
        if not item.text.strip() or not tokens:
            raise UserError(f"{item.source}: empty text; remove this row.")
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1] != end:
            tokens = [*tokens, end]
        example = _example(tokens, np.ones(len(tokens), bool), "there is no token to predict", item.source)
        return example if self._media is None else self._media.with_pictures(example, ())

    def _chat_example(self, item: Conversation, row: ChatRow, tokens: list[int], rows: int) -> Example:
        source = item.source if rows == 1 else f"{item.source}{PART}{row.messages})"
        targets, others = self._chats.targets(row, tokens, source)
        if item.turns is not None:
            thinking = item.options.get(THINKING, self._thinking)
            self.prompts += Counter({thinking: len(row.turns) - others, not thinking: others})
        example = _example(tokens, targets, "no assistant turn counts", source)
        if self._media is None:
            return example
        # A row of a conversation that takes several holds the first images of it.
        return self._media.with_pictures(example, [one for one in item.media if one.message < row.messages])


def _example(tokens: list[int], targets: np.ndarray, otherwise: str, source: str) -> Example:
    """Build an example; UserError, which says `otherwise`, where none of its tokens counts in the loss."""
    targets[:1] = False
    if not targets.any():
        raise UserError(
            f"{source}: nothing to learn from: {otherwise}, so every token is masked; remove this row or correct it."
        )
    return Example(np.array(tokens, np.int32), targets, source)


def check_answers(messages: Messages, turns: list[int], source: str) -> None:
    """Raise UserError for an answer among these turns without text, reasoning, call or picture: it teaches to stop."""
    for turn in turns:
        message = messages[turn]
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        says = any(part.get("type") != "text" or part["text"].strip() for part in parts)
        reasons = any(str(message.get(key) or "").strip() for key in REASONING)
        if not (says or reasons or message.get(TOOL_CALLS)):
            raise UserError(
                f"{source}: message {turn + 1}: empty answer: there is nothing to learn from; remove this row, or give "
                'the message "weight": 0.'
            )


ROLES = [SYSTEM, "developer", "user", ASSISTANT, TOOL]


def check_template(messages: Messages, template: str | None, source: str) -> None:
    """Refuse, with a UserError, roles and calls of tools that a chat template does not know; None stands for code.

    A common role is always taken. Many templates write whatever role they are given, so a mistyped one would train as
    it stands.
    """
    if template is None:
        return
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", template):
            raise UserError(
                f"{source}: message {number}: unknown role {role!r}{nearest(role, ROLES)}; expected "
                f"{', '.join(ROLES)}, or a role that the model's chat template names."
            )
        if message.get(TOOL_CALLS) and TOOL_CALLS not in template:
            raise UserError(
                f"{source}: message {number}: the model's chat template does not write calls of tools "
                f"({TOOL_CALLS!r}), so this one would be lost; write it into the content, or use a model whose "
                "template writes them."
            )
