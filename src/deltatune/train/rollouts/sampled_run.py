"""Makes the batches of a run that samples them, from the parts of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data.batches.batch import Batch
from ...data.batches.order import BatchOrder
from ...data.example import Example
from ...lora.convert import without_adapters
from ...machine.numpy_arrays import as_numpy
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


def scoring_of(model: nn.Module, token_losses: TokenLosses) -> Scoring:
    """Return the functions that score answers in training's forward pass, each compiled once for each batch shape."""

    def log_probabilities(inputs: mx.array, targets: mx.array, *_: Any) -> tuple[mx.array]:
        return (-token_losses(inputs, targets),)

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


def rollout_order(
    loaded: Loaded,
    config: TrainConfig,
    prompts: BatchOrder,
    token_losses: TokenLosses,
    rewards: Rewards,
    ending: Ending,
    world: World,
) -> RolloutOrder:
    """Return the batches of a run.

    Args:
        loaded: The model, set up by setup.training(), and its tokenizer with the tokens that end an answer.
        config: The options of the run.
        prompts: This rank's prompts, in their order.
        token_losses: The tokens' losses under the sampled policy.
        rewards: The reward functions.
        ending: It is asked between two tokens whether the run ends.
        world: The ranks of the run.
    """

    def between() -> None:
        if ending.asks_to_stop():
            raise InterruptedSamplingError

    sampler = _rewarded_sampler(loaded, config, prompts, rewards, between, world)
    return RolloutOrder(prompts, sampler, scoring_of(loaded.model, token_losses), config, world)


def _rewarded_sampler(
    loaded: Loaded,
    config: TrainConfig,
    prompts: BatchOrder,
    rewards: Rewards,
    between: Callable[[], None],
    world: World,
) -> RewardedSampler:
    rows = config.batch_size // world.size * config.grad_accumulation_steps * config.num_generations
    return RewardedSampler(AnswerSampler(loaded, config, rows, prompts.widths[-1], between), rewards, between)


def say_reward(
    name: str,
    loaded: Loaded,
    config: TrainConfig,
    prompts: Sequence[Example],
    rewards: Rewards,
    world: World,
    screen: Screen,
) -> float:
    """Answer the prompts of a split, print the mean reward and return it.

    Args:
        name: The split, as the line names it.
        loaded: The model, and its tokenizer with the tokens that end an answer.
        config: The options of the run.
        prompts: The prompts of the split.
        rewards: The reward functions.
        world: The ranks of the run.
        screen: Where the line is printed.

    Raises:
        NoResultError: The probability of a token is not finite.
    """
    order = batch_order(prompts, config, world)
    sampler = _rewarded_sampler(loaded, config, order, rewards, lambda: None, world)
    evaluation = RewardEvaluation(sampler, config, world)
    with patched():
        loss = evaluation(order, config.test_batches)
    assert loss is not None
    screen.say(f"{name} loss {loss:.4f}{line(evaluation.figures)}.")
    return -loss
