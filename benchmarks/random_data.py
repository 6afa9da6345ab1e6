"""Random examples for programs that measure training, and a tokenizer of which nothing is saved."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deltatune.data.example import Example


class UnsavedTokenizer:
    """Stands for the tokenizer that a run saves beside its model."""

    has_chat_template = False

    def save_pretrained(self, folder: str) -> None:
        """Nothing to write."""


def random_examples(random: np.random.Generator, lengths: Iterable[int], vocabulary: int = 512) -> list[Example]:
    """Examples that count every token; each has one token more than its length, since inputs and targets overlap."""
    rows = [random.integers(0, vocabulary, length + 1).astype(np.int32) for length in lengths]
    return [Example(row, np.ones(len(row), bool), "random") for row in rows]
