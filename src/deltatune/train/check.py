"""Refuses a run that cannot train, before anything is written or changed."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from ..config import TrainConfig
from ..data import Splits
from ..errors import UserError
from ..models.vocabulary import check_examples
from .announce import trainable_count

_COUNTS = ("iters", "batch_size", "grad_accumulation_steps", "steps_per_report", "steps_per_eval", "save_every")


def check(model: nn.Module, tokenizer: Any, config: TrainConfig, splits: Splits) -> None:
    """Check what the training loop takes for granted.

    Raises:
        UserError: If a count is below 1, copies are to be kept that the run does not write, early stopping has no
            validation data, no parameter is trainable, or the model has no row for a token of the examples.
    """
    for name in _COUNTS:
        if getattr(config, name) < 1:
            raise UserError(f"{name}: expected 1 or more, got {getattr(config, name)}.")
    if config.keep is not None and (config.keep < 0 or config.fine_tune_type == "full"):
        what = "full fine-tuning writes no numbered copies" if config.keep >= 0 else "expected 0 or more"
        raise UserError(f"keep: {what}, got {config.keep}.")
    if config.early_stopping is not None and not splits.valid:
        raise UserError("early_stopping needs validation data (valid.jsonl), and there is none.")
    if not trainable_count(model):
        raise UserError("nothing in the model is trainable: convert it (convert_to_lora), or unfreeze layers.")
    check_examples(model, tokenizer, [*splits.train, *splits.valid])
