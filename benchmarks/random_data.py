"""Small models and random examples for programs that count buffers, and a tokenizer of which nothing is saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from deltatune.data.example import Example
from trainers import Shape


def small_config(family: str, depth: int) -> dict[str, Any]:
    """The config.json of a small model of this many layers, in which every second one is attention."""
    is_mixture = family.endswith("moe")
    mlp, experts = (256, (8, 2)) if is_mixture else (1024, None)
    shape = Shape("small", 256, mlp, depth, (4, 2, 64), (2, 4, 64), 512, 1, 512, "float32", experts, interval=2)
    return {"model_type": family, "text_config": shape.config() | {"model_type": f"{family}_text"}}


class UnsavedTokenizer:
    """Stands for the tokenizer that a run saves beside its model."""

    has_chat_template = False

    def save_pretrained(self, folder: str) -> None:
        """Nothing to write."""


def random_examples(random: np.random.Generator, lengths: Iterable[int], vocabulary: int = 512) -> list[Example]:
    """Examples that count every token; each has one token more than its length, since inputs and targets overlap."""
    rows = [random.integers(0, vocabulary, length + 1).astype(np.int32) for length in lengths]
    return [Example(row, np.ones(len(row), bool), "random") for row in rows]
