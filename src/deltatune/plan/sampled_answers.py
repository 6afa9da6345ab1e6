"""Adds the memory in which a run samples its answers to the forecast of its step."""

from __future__ import annotations

from dataclasses import replace

import mlx.nn as nn

from ..data.batches.order import BatchOrder
from ..data.batches.stream_order import StreamOrder
from ..machine.compiling import without_kernels
from ..models.batch_decoder import ROWS, can_be_joined
from ..models.generate import begun, cache_bytes
from ..models.vision.split import has_vision
from ..options.config import TrainConfig
from ..patches import patched
from ..train.evaluation.evaluate import inferring
from .forecast import Forecast, Moment

# The memory of decoding, in states of all rows: those before a step, the new ones, and copies where no kernel serves.
_STATES = 4
# The same in keys and values of all rows: a step writes into them; while prompts are read, a copy stands beside them.
_KEYS = 2
# How many arrays of fp32 logits are alive while a token is sampled: those of the model and of the policy, their
# exponentials, and two more where they are sorted for top_p.
_LOGITS = 6


def with_sampling(
    forecast: Forecast, model: nn.Module, config: TrainConfig, packed: BatchOrder | StreamOrder | None = None
) -> Forecast:
    """Return the forecast of a run's largest moment, which may be the sampling of its answers before a step.

    It is an estimate from above: the caches of all rows at full length, with the copies of a step. `packed` are the
    batches of data with several prompts in a row.
    """
    pictures = has_vision(model)
    if not config.samples_answers or not (pictures or can_be_joined(model)):
        return forecast
    rows = forecast.rows * config.grad_accumulation_steps
    length = forecast.length
    if packed is not None:
        rows = rows * packed.slots
        length = packed.longest
    # Answers to prompts with pictures are sampled one prompt after the other.
    rows = config.rows_each if pictures else min(ROWS, rows)
    decoder = model["language_model"] if pictures else model
    with without_kernels(), patched(), inferring(model):
        caches = cache_bytes(decoder)
        logits = list(begun(decoder, 2))[-1][-1]
    of_row = _STATES * caches.fixed + _KEYS * caches.token * (length + 2) + _LOGITS * 4 * logits.shape[-1]
    amount = forecast.sizes["parameters"] + forecast.sizes["moments"] + rows * of_row
    if amount <= forecast.bytes.amount:
        return forecast
    return replace(forecast, bytes=Moment(amount, f"sampling {rows:,} answers, before the step"))
