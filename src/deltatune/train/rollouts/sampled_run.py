"""Makes the batches of a run that samples answers, from the parts of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data.batches.batch import Batch
from ...data.batches.order import AnsweredOrder, BatchOrder
from ...data.batches.stream_order import StreamOrder
from ...data.example import Example
from ...lora.convert import without_adapters
from ...machine.host_memory import as_numpy
from ...models.load import Loaded
from ...options.config import TrainConfig
from ...patches import patched
from ...rewards import Rewards
from ..batch_loss import arrays, loss_of
from ..compiled import Compiled
from ..distributed import World
from ..ending.early_end import Ending
from ..ending.interrupt import InterruptedSamplingError
from ..evaluation.evaluate import evaluating
from ..preferences.loss import TokenLosses
from ..preferences.objectives import line
from ..reports.screen import Screen
from ..setup import batch_order
from .answer_sampler import AnswerSampler
from .rewarded_sampler import RewardedSampler, RewardEvaluation
from .rollout_order import RolloutOrder, Scoring
from .student_order import StudentOrder


def scoring_of(model: nn.Module, token_losses: TokenLosses) -> Scoring:
    """Return the functions that score answers in training's forward pass, each compiled once for each batch shape."""

    def log_probabilities(inputs: mx.array, targets: mx.array, _: mx.array, *more: Any) -> tuple[mx.array]:
        return (-token_losses(inputs, targets, *more[:-1]),)

    def compiled() -> Callable[[Batch], np.ndarray]:
        whole = Compiled(lambda batch: loss_of(log_probabilities, batch), [model.state])

        def score(batch: Batch) -> np.ndarray:
            with evaluating(model):
                return as_numpy(whole(arrays(batch))[0])

        return score

    of_policy, of_base = compiled(), compiled()

    def reference(batch: Batch) -> np.ndarray:
        with without_adapters(model):
            return of_base(batch)

    return Scoring(of_policy, reference)


def sampled_order(
    loaded: Loaded,
    config: TrainConfig,
    data: BatchOrder | StreamOrder,
    token_losses: TokenLosses | None,
    rewards: Rewards | None,
    ending: Ending,
    world: World,
) -> RolloutOrder | StudentOrder:
    """Return the batches of a run from its data, of rewarded answers where there are rewards.

    `loaded` is set up for training, and `token_losses`, which rewards need, are those under the sampled policy.
    `ending` is asked between two tokens whether the run ends.
    """

    def between() -> None:
        if ending.asks_to_stop():
            raise InterruptedSamplingError

    sampler = _sampler(loaded, config, data, between, world)
    if rewards is None:
        assert isinstance(data, AnsweredOrder | StreamOrder)
        return StudentOrder(data, sampler, config, world)
    assert token_losses is not None
    assert isinstance(data, BatchOrder)
    rewarded = RewardedSampler(sampler, rewards, between)
    return RolloutOrder(data, rewarded, scoring_of(loaded.model, token_losses), config, world)


def _sampler(
    loaded: Loaded, config: TrainConfig, data: BatchOrder | StreamOrder, between: Callable[[], None], world: World
) -> AnswerSampler:
    rows = config.batch_size // world.size * config.grad_accumulation_steps * config.rows_each * data.slots
    return AnswerSampler(loaded, config, rows, data.longest, between)


def say_reward(
    name: str,
    loaded: Loaded,
    config: TrainConfig,
    prompts: Sequence[Example],
    rewards: Rewards,
    world: World,
    screen: Screen,
) -> float:
    """Answer the prompts of a split, print its name and mean reward, and return the mean.

    A probability that is not finite raises NoResultError.
    """
    order = batch_order(prompts, config, world)
    sampler = RewardedSampler(_sampler(loaded, config, order, lambda: None, world), rewards, lambda: None)
    evaluation = RewardEvaluation(sampler, config, world)
    with patched():
        loss = evaluation(order, config.test_batches)
    assert loss is not None
    screen.say(f"{name} loss {loss:.4f}{line(evaluation.figures)}.")
    return -loss
