"""Reads the rows of a table as examples: tokenises them, opens their images and applies the length limit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from ..errors import UserError
from ..machine.environment import expanded
from ..options.config import TrainConfig
from ..options.values import agreeing
from . import token_cache
from .chats import unwritten
from .example import Example
from .preferences.preference import Preference
from .preferences.preference_rows import PreferenceEncoder
from .rows.row_formats import ALPACA, SHAREGPT, Features
from .rows.sources import DataTable
from .rows.unread_columns import MEANINGS
from .text import MediaPlacer, TextEncoder
from .token_cache import Encoded
from .vision.media import VisionProcessors, media_reader

# A table with fewer rows than this is read without a progress bar.
_PROGRESS_ROWS = 2000
LAST_TURN = "last"
_MEANINGS = {
    SHAREGPT: "human is the user, gpt the assistant",
    ALPACA: "instruction and input are the prompt, output is the completion",
}


class Reader:
    """Reads tables as examples, and collects the formats of their rows (`kinds`) and notes for the user.

    `prompts` counts the turns behind a prompt with each value of enable_thinking.
    """

    def __init__(self, config: TrainConfig, tokenizer: Any, processors: VisionProcessors | None = None):
        self._config = config
        self._tokenizer = tokenizer
        self._vision = processors
        self.kinds: set[str] = set()
        self.prompts = Counter[bool]()
        self.notes: list[str] = []
        self._doubled_start = False

    def read(self, table: DataTable, features: Features) -> list[Example | Preference]:
        """Return the examples of a table; one that is too long is truncated or left out, as `overlong` says."""
        encoded = self._encoded(table, features)
        self.kinds |= encoded.kinds.keys()
        self.prompts += encoded.prompts
        self._note_formats(table, encoded)
        self._note_doubled_start(table, encoded)
        limit = self._config.max_seq_length
        skip = self._config.overlong == "skip"
        examples: list[Example | Preference] = []
        overlong: list[int] = []
        cut_media: list[str] = []
        beyond = 0
        for example, within in (pair for row in encoded.rows for pair in _within(row, limit)):
            documents = example.documents
            length = max(len(document.tokens) for document in documents)
            if length <= limit:
                examples.append(example)
                continue
            overlong.append(length)
            if skip:
                continue
            if not within:
                beyond += 1
            elif kinds := list(filter(None, (_kind_cut(document, limit) for document in documents))):
                cut_media.append(kinds[0])
            else:
                examples.append(example.with_documents([_truncated(document, limit) for document in documents]))
        if overlong:
            self._note_overlong(table, overlong, cut_media, beyond, sum(map(len, encoded.rows)))
        return examples

    def _encoded(self, table: DataTable, features: Features) -> Encoded:
        """Return the examples of a table at full length: those of an earlier start, or new ones, which are kept."""
        key = self._key(table, features)
        stored = token_cache.read(key, table.name) if key is not None else None
        if stored is not None:
            return stored
        preferred = self._config.has_preferences
        if preferred and features != Features():
            raise UserError(
                f"{table.name}: --loss {self._config.loss} reads prompt, chosen, rejected, completion and label under "
                "these names; rename the columns, and leave out the options that name others."
            )
        text = TextEncoder(
            self._tokenizer,
            Features() if preferred else features,
            self._config.mask_prompt,
            last_turn=self._config.chat_turns == LAST_TURN,
            template_options=self._config.chat_template_config,
            media=media_placer(self._config, self._tokenizer, self._vision),
        )
        encoder: Any = text
        if preferred:
            encoder = PreferenceEncoder(text, self._tokenizer, labels=self._config.loss == "kto")
        rows = _with_progress(encoder.stream(table.rows(), table.count), table)
        kinds = encoder.kinds if preferred else text.formats.kinds
        encoded = Encoded(rows, kinds, text.formats.unread, text.unwritten, text.prompts)
        if key is not None:
            token_cache.keep(key, table.name, encoded)
        return encoded

    @cached_property
    def _encoding(self) -> str | None:
        return token_cache.encoding_digest(self._tokenizer)

    def _key(self, table: DataTable, features: Features) -> str | None:
        """Return the key under which a table's tokens are kept; None where images, preferences or streams are read."""
        if table.digest is None or self._vision is not None or self._config.has_preferences or self._encoding is None:
            return None
        options = [
            vars(features), self._config.mask_prompt, self._config.chat_turns, self._config.chat_template_config,
        ]  # fmt: skip
        return token_cache.digest([self._encoding, json.dumps(options), table.digest()])

    def _note(self, table: DataTable, text: str) -> None:
        self.notes.append(f"{table.name}: {text}")

    def _note_formats(self, table: DataTable, encoded: Encoded) -> None:
        for kind, meaning in _MEANINGS.items():
            if count := encoded.kinds.get(kind):
                self._note(table, f"{count:,} {agreeing(count, 'rows')} in {kind}'s format: {meaning}.")
        for what, meaning in MEANINGS.items():
            if count := encoded.unread[what]:
                self._note(table, f"{count:,} {agreeing(count, 'rows have')} {meaning}.")
        for counted in encoded.unwritten.items():
            self._note(table, unwritten.note(*counted))
        several = [len(row) for row in encoded.rows if len(row) > 1]
        if several:
            self._note(
                table,
                f"{len(several):,} of {len(encoded.rows):,} conversations {agreeing(len(several), 'take')} several "
                f"rows, {sum(several):,} in all: the chat template rewrites earlier turns once others follow, so each "
                "turn is learnt in a row in which it stands as it is generated. --chat-turns last learns the last one "
                "alone.",
            )

    def _note_doubled_start(self, table: DataTable, encoded: Encoded) -> None:
        """Note once that texts begin with the start token already, before which the tokenizer puts another."""
        start = self._tokenizer.bos_token_id
        if start is None or self._doubled_start:
            return
        documents = [document for row in encoded.rows for example in row for document in example.documents]
        count = sum(document.tokens[:2].tolist() == [start, start] for document in documents)
        if count:
            self._doubled_start = True
            self._note(
                table,
                f"{count:,} {agreeing(count, 'texts begin')} with {self._tokenizer.bos_token} twice: the data hold it "
                "already, and the tokenizer puts one before every text. Remove it from the data, or give messages in "
                "the place of texts.",
            )

    def _note_overlong(
        self, table: DataTable, lengths: list[int], cut_media: list[str], beyond: int, total: int
    ) -> None:
        skip = self._config.overlong == "skip"
        done, other = ("skipped", "truncate cuts them") if skip else ("truncated", "skip leaves them out")
        count = len(lengths)
        self._note(
            table,
            f"{count:,} of {total:,} examples {agreeing(count, 'are')} longer than max_seq_length "
            f"{self._config.max_seq_length:,} (the longest has {max(lengths):,} tokens) and {agreeing(count, 'were')} "
            f"{done}; --overlong {other}.",
        )
        if cut_media:
            what = " or ".join({"image": "an image", "video": "a video"}[kind] for kind in sorted(set(cut_media)))
            fewer = ", or take fewer frames with --video-max-frames" if "video" in cut_media else ""
            self._note(
                table,
                f"{len(cut_media):,} of them {agreeing(len(cut_media), 'were')} skipped, not truncated: the limit "
                f"would cut {what} in half. Raise max_seq_length, or scale images down with --max-pixels{fewer}.",
            )
        if beyond:
            self._note(
                table,
                f"{beyond:,} of them {agreeing(beyond, 'were')} left out, not truncated: the turns that are learnt "
                "there begin beyond the limit.",
            )


def _with_progress(rows: Iterator[list[Any]], table: DataTable) -> list[list[Any]]:
    """Return the examples of each row; on a terminal, a bar shows how many of a large table are read.

    A stream is read while the bar of the training stands there.
    """
    console = Console(stderr=True)
    if table.digest is None or table.count < _PROGRESS_ROWS or not console.is_terminal:
        return list(rows)
    # The brackets around the name of a split are no markup.
    return list(track(rows, escape(f"Tokenising {table.name}"), table.count, console=console, transient=True))


def _within(row: list[Any], limit: int) -> list[tuple[Any, bool]]:
    """Return the examples of a row of data, and whether each is trained on.

    A conversation in one row loses the turns beyond the limit where it is cut. In several rows it loses the same turns.
    """
    within = [all(document.targets[:limit].any() for document in example.documents) for example in row]
    return list(zip(row, within if any(within) else [True] * len(row), strict=True))


def _kind_cut(example: Example, limit: int) -> str | None:
    return None if example.pictures is None else example.pictures.kind_cut(example.tokens, limit)


def _truncated(example: Example, limit: int) -> Example:
    """Return the first `limit` tokens of an example; UserError where none of them counts in the loss."""
    tokens, targets = example.tokens[:limit].copy(), example.targets[:limit].copy()
    if not targets.any():
        first = int(np.argmax(example.targets))
        raise UserError(
            f"{example.source}: the prompt alone takes {first:,} tokens, so nothing to learn is left within "
            f"max_seq_length {limit:,}; raise it, shorten the prompt, or leave such examples out with --overlong skip."
        )
    pictures = None if example.pictures is None else example.pictures.cut(tokens)
    return replace(example, tokens=tokens, targets=targets, pictures=pictures)


def media_placer(config: TrainConfig, tokenizer: Any, vision: VisionProcessors | None) -> MediaPlacer | None:
    """Return the placer of the images and videos of a run's rows; None for a text model."""
    if vision is None:
        return None
    # The files of a data set under hf_dataset lie in the current folder.
    data = expanded(config.data or "")
    reader = media_reader(vision, data.parent if data.is_file() else data, vars(config))
    return MediaPlacer(vision.spec, reader, tokenizer)
