"""Refuses options with which a run could not begin or would do nothing, before anything is loaded."""

from __future__ import annotations

from ..errors import UserError
from ..options.conditions import TRAINING, Facts, changed_options, refuse_unread
from ..options.config import TrainConfig
from .preferences.objectives import objective_of
from .updates.optimizer import build_optimizer
from .updates.parameter_groups import weight_decay

# Of these, one step moves a number by about the learning rate whatever its gradient is.
_STEP_IS_RATE = ("adam", "adamw", "adam8bit", "adamw8bit", "adamax", "lion", "muon")
# A thousand times a usual rate for adapters.
_LARGEST_USUAL = 0.1


def check_options(config: TrainConfig) -> list[str]:
    """Check the optimizer, the loss and the number of updates, as far as possible without a model and data.

    Returns:
        Notes on settings that are possible, and hardly meant.

    Raises:
        UserError: A setting is unknown, wrong or not read, or the run would make no update.
    """
    refuse_unread(TRAINING, changed_options(config), config, Facts())
    optimizer = build_optimizer(config)
    if config.decay_norm_and_bias and not weight_decay(optimizer):
        raise UserError(
            f"decay_norm_and_bias: the weight decay of {config.optimizer} is 0 here; set it in optimizer_config, such "
            "as {adamw: {weight_decay: 0.01}} for optimizer: adamw, or leave decay_norm_and_bias out."
        )
    objective_of(config)
    if config.epochs is None:
        check_updates(config)
    schedule = config.lr_schedule
    rate: float = schedule["arguments"][0] if isinstance(schedule, dict) else config.learning_rate
    if config.optimizer.lower() in _STEP_IS_RATE and rate > _LARGEST_USUAL:
        return [
            f"Note: the learning rate is {rate:g}, and a step of {config.optimizer} moves every trained number by "
            "about as much; usual rates are 1e-5 to 1e-3."
        ]
    return []


def check_updates(config: TrainConfig) -> None:
    """Check that a run makes an update that can change something; `config.iters` is final.

    Raises:
        UserError: It makes none, or a single one at a learning rate of 0.
    """
    accumulated, iterations = config.grad_accumulation_steps, config.iters
    if iterations < accumulated:
        raise UserError(
            f"grad_accumulation_steps: {accumulated:,} iterations make one update, and the run has {iterations:,}, so "
            f"it would change nothing. Give {iterations} or fewer, or more iters or epochs."
        )
    if iterations // accumulated == 1 and build_optimizer(config).learning_rate.item() == 0:
        raise UserError(
            "lr_schedule: the run makes one update, and its learning rate is 0, so it would change nothing. Give more "
            "iterations, or no warmup."
        )
