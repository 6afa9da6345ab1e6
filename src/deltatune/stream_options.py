"""The options of a run that streams its training data, and what cannot be combined with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import UserError
from .values import Range, about

_GROUP = "data"


@dataclass
class StreamOptions:
    """The options of TrainConfig that say whether the training data is streamed, and how much of it is held."""

    streaming: bool = field(
        default=False,
        metadata=about(
            _GROUP,
            "read and tokenise the training data while training, so that it need not fit in memory; validation and "
            "test read no more rows than they evaluate",
        ),
    )
    shuffle_buffer: int = field(
        default=1000,
        metadata=about(
            _GROUP,
            "number of rows that streaming reads at a time; these are shuffled, and packed with one another",
            range=Range(least=1),
        ),
    )


def check_streaming(config: Any) -> None:
    """Raise a UserError where another option of a TrainConfig has no meaning for data that is streamed."""
    if not config.streaming:
        return
    if config.loss != "sft":
        raise UserError(
            f"streaming: the loss {config.loss} reads its whole data set before the first step, so it cannot be "
            "streamed; leave streaming out."
        )
    if config.epochs is not None:
        raise UserError("streaming: the length of the data is not known, so epochs cannot be counted; give iters.")
    if config.shuffle_buffer < config.batch_size:
        raise UserError(
            f"shuffle_buffer: expected at least batch_size, which is {config.batch_size}, got {config.shuffle_buffer}."
        )
