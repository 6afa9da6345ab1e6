"""Reads the rows of a table as examples: tokenises them, opens their images and applies the length limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ..config import TrainConfig
from ..errors import UserError
from ..models.vision.inputs import VisionSpec
from .example import Example
from .preferences.preference import Preference
from .preferences.rows import PreferenceEncoder
from .sources import DataTable
from .text import Features, TextEncoder
from .vision.encoder import VisionEncoder
from .vision.images import ImageReader
from .vision.media import MediaReader
from .vision.videos import VideoReader, video_names

# A table with fewer rows than this is read without a progress bar.
_PROGRESS_ROWS = 2000


@dataclass(frozen=True)
class VisionProcessors:
    """The parts of a vision model that reading images and videos needs.

    Args:
        processor: the model's image processor.
        spec: the token ids and sizes of the vision tower.
        videos: the model's video processor, or None if it has none.
    """

    processor: Any
    spec: VisionSpec
    videos: Any = None


class Reader:
    """Reads tables as examples, and collects the formats of their rows (`kinds`) and notes for the user (`notes`)."""

    def __init__(self, config: TrainConfig, tokenizer: Any, processors: VisionProcessors | None = None):
        self._config, self._tokenizer, self._vision = config, tokenizer, processors
        self.kinds: set[str] = set()
        self.notes: list[str] = []

    def read(self, table: DataTable, features: Features) -> list[Example | Preference]:
        """Return the examples of a table; one that is too long is truncated or left out, as `overlong` says."""
        encoder = self._encoder(features)
        limit, skip = self._config.max_seq_length, self._config.overlong == "skip"
        examples: list[Example | Preference] = []
        overlong, longest = 0, 0
        cut_media: list[str] = []
        # A progress bar belongs on a terminal and not in a log file.
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            hidden = table.count < _PROGRESS_ROWS
            task = progress.add_task(f"Tokenising {table.name}", total=table.count, visible=not hidden)
            for source, row in table.rows():
                example = encoder(row, source)
                progress.advance(task)
                documents = example.documents
                length = max(len(document.tokens) for document in documents)
                if length > limit:
                    overlong, longest = overlong + 1, max(longest, length)
                    if skip:
                        continue
                    if kinds := [kind for document in documents if (kind := _kind_cut(document, limit))]:
                        cut_media.append(kinds[0])
                        continue
                    example = example.with_documents([_truncated(document, limit) for document in documents])
                examples.append(example)
        self._note_overlong(table, overlong, cut_media, longest, len(examples))
        self.kinds |= encoder.kinds
        return examples

    def _encoder(self, features: Features) -> TextEncoder | VisionEncoder | PreferenceEncoder:
        """Return the encoder of rows with these keys."""
        if self._config.loss == "sft":
            return self._conversations(features)
        return PreferenceEncoder(self._conversations(Features()), self._tokenizer, labels=self._config.loss == "kto")

    def _conversations(self, features: Features) -> TextEncoder | VisionEncoder:
        """Return the encoder of texts and conversations with these keys."""
        text = TextEncoder(self._tokenizer, features, self._config.mask_prompt)
        if self._vision is None:
            return text
        limits = {
            name: value for name in ("min_pixels", "max_pixels") if (value := getattr(self._config, name)) is not None
        }
        folder = Path(self._config.data).expanduser()
        images = ImageReader(self._vision.processor, folder, limits)
        videos = VideoReader(self._vision.videos, folder, limits, self._config.fps, self._config.video_max_frames)
        names = video_names(self._tokenizer, self._vision.spec)
        return VisionEncoder(text, self._vision.spec, MediaReader(images, videos), names)

    def _note_overlong(self, table: DataTable, overlong: int, cut_media: list[str], longest: int, count: int) -> None:
        """Note how many examples of a table were too long, and what was done with them."""
        if not overlong:
            return
        skip = self._config.overlong == "skip"
        total = overlong + count if skip else count + len(cut_media)
        done, other = ("skipped", "truncate cuts them") if skip else ("truncated", "skip leaves them out")
        self.notes.append(
            f"{table.name}: {overlong:,} of {total:,} examples are longer than max_seq_length "
            f"{self._config.max_seq_length:,} (the longest has {longest:,} tokens) and were {done}; "
            f"--overlong {other}."
        )
        if cut_media:
            what = " or ".join({"image": "an image", "video": "a video"}[kind] for kind in sorted(set(cut_media)))
            fewer = ", or take fewer frames with --video-max-frames" if "video" in cut_media else ""
            self.notes.append(
                f"{table.name}: {len(cut_media):,} of them were skipped, not truncated: the limit would cut {what} in "
                f"half. Raise max_seq_length, or scale images down with --max-pixels{fewer}."
            )


def _kind_cut(example: Example, limit: int) -> str | None:
    """Return "image" or "video" if cutting the example would cut one in half, else None."""
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
