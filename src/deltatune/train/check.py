"""Refuses a run that cannot train, before anything is written or changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.nn as nn

from ..data import Splits
from ..data.batches.example_stream import StreamedSplits
from ..errors import UserError
from ..models.vocabulary import check_examples
from ..options.config import TrainConfig
from .reports.announce import trainable_count


def check(model: nn.Module, tokenizer: Any, config: TrainConfig, splits: Splits) -> None:
    """Check what the training loop takes for granted.

    Raises:
        UserError: If early stopping has no validation data, no parameter is trainable, or the model has no row for a
            token of the examples.
    """
    if config.early_stopping is not None and not splits.valid:
        raise UserError("early_stopping needs validation data (valid.jsonl), and there is none.")
    if not trainable_count(model):
        raise UserError("nothing in the model is trainable: convert it (convert_to_lora), or unfreeze layers.")
    check_examples(model, tokenizer, splits.documents())
    if isinstance(splits, StreamedSplits):
        splits.stream.checks.append(partial(check_examples, model, tokenizer))
