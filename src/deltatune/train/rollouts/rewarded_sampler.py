"""Samples answers and rewards them, for the batches of a run and for its evaluations.

The figures of a sampling have TRL's names, and advantages follow TRL's formulas.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from ...data.batches.order import BatchOrder
from ...data.prompts import PromptExample
from ...data.rows.row_formats import ASSISTANT
from ...options.config import TrainConfig
from ...rewards import Rewards
from ..distributed import World
from ..ending.interrupt import InterruptedSamplingError
from ..preferences.objectives import means
from ..tree import iteration_key
from .answer_sampler import AnswerSampler, SampledAnswers

# It is added to a standard deviation before a division by it.
_LEAST = 1e-4


def total_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sums [N] of the rewards [functions, N]; NaN where no function gave a number."""
    sums = np.nansum(rewards * weights[:, None], axis=0)
    return np.where(np.isnan(rewards).all(axis=0), np.nan, sums)


def deviation(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the standard deviation of the numbers of n values over n - 1; NaN for fewer than two."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanstd(values, axis=axis, ddof=1)


def mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the mean of the values that are numbers; NaN without any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def group_advantages(totals: np.ndarray, scale: str, everyone: np.ndarray | None = None) -> np.ndarray:
    """Return the advantage of each answer over the others to its prompt, [P, G]; 0 for an answer without a reward.

    `totals` [P, G] are the rewards, NaN for none. The standard deviation of a "group" or of the "batch" divides them;
    `everyone` are the rewards of all ranks for "batch", `totals` by default (arXiv:2402.03300; trl.GRPOTrainer).
    """
    centred = totals - mean(totals, 1)[:, None]
    if scale == "group":
        centred = centred / (deviation(totals, 1)[:, None] + _LEAST)
    elif scale == "batch":
        centred = centred / (deviation(totals if everyone is None else everyone) + _LEAST)
    return np.nan_to_num(centred, nan=0.0)


def leave_one_out(totals: np.ndarray) -> np.ndarray:
    """Return each reward [P, G] less the mean of the others to its prompt; 0 where it or all others are NaN.

    Source: Ahmadian et al. 2024, arXiv:2402.14740; trl.RLOOTrainer.
    """
    scored = ~np.isnan(totals)
    others = np.nansum(totals, axis=1, keepdims=True) - np.nan_to_num(totals)
    count = scored.sum(axis=1, keepdims=True) - scored
    baseline = np.where(count > 0, others / np.maximum(count, 1), np.nan)
    return np.nan_to_num(totals - baseline, nan=0.0)


REWARD = "reward"
EXACT = "rewards/exact"
LENGTH = "completions/mean_length"
# The figures of answers, whether they are rewarded or not.
ANSWERS = (LENGTH, "completions/max_length", "completions/clipped_ratio", "entropy", "seconds/sampling")
_FIGURES = (REWARD, "reward_std", EXACT, "frac_reward_zero_std", *ANSWERS, "seconds/rewards")


def names_of(rewards: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the figures, with those of each reward function."""
    return (*_FIGURES, *(f"rewards/{name}/{kind}" for name in rewards for kind in ("mean", "std")))


def answer_figures(answers: SampledAnswers, seconds: float) -> list[tuple[float, int]]:
    """Return the sums and counts of the figures ANSWERS, of answers that were sampled in so many seconds."""
    tokens = int(answers.lengths.sum())
    number = len(answers.lengths)
    return [
        (tokens, number),
        (int(answers.lengths.max()), 1),
        (number - int(answers.ended.sum()), number),
        (float(answers.entropies.sum()), tokens),
        (seconds, 1),
    ]


def figures(
    rewards: np.ndarray, totals: np.ndarray, answers: SampledAnswers, seconds: tuple[float, float]
) -> np.ndarray:
    """Return the sums and counts of the figures of a sampling, float32 [2, F].

    `rewards` [functions, N] are NaN where a function gave no number; `totals` [P, G] are the weighted sums of each of
    the N = P G answers. The seconds are those of sampling and of the rewards.
    """
    scored = totals[~np.isnan(totals)]
    # An answer is exact where each function that judged it gave 1 or more.
    exact = (np.nan_to_num(rewards, nan=1.0) >= 1).all(axis=0)[~np.isnan(totals.reshape(-1))]
    pairs = [
        (scored.sum(), scored.size),
        _one(deviation(totals)),
        (exact.sum(), exact.size),
        (np.isclose(deviation(totals, 1), 0).sum(), len(totals)),
        *answer_figures(answers, seconds[0]),
        (seconds[1], 1),
    ]
    for of_function in rewards:
        pairs += [_one(mean(of_function)), _one(deviation(of_function))]
    return np.array(pairs, np.float32).T


def _one(value: np.ndarray) -> tuple[float, int]:
    """Return a number and its count; 0 and 0 in the place of NaN."""
    return (0.0, 0) if np.isnan(value) else (float(value), 1)


# The sampling whose random key evaluations take; a run has no such sampling.
_EVALUATION = 2**63


class RewardedSampler:
    """Samples answers to prompts, and rewards them.

    `check` is called while rewards are awaited, and may leave the sampling by an error. `texts` returns the texts of
    answers, without their ends.
    """

    def __init__(self, sampler: AnswerSampler, rewards: Rewards, check: Callable[[], None]):
        self.rewards = rewards
        self.texts = sampler.texts
        self._sampler = sampler
        self._check = check

    def __call__(
        self, prompts: Sequence[PromptExample], key: mx.array
    ) -> tuple[SampledAnswers, np.ndarray, tuple[float, float]]:
        """Sample N answers to prompts, those to a prompt one after the other; they depend on `key`.

        Returns the answers, their rewards [functions, N] in fp32, and the seconds of sampling and of the rewards.
        """
        started = time.perf_counter()
        answers = self._sampler(prompts, key)
        sampled = time.perf_counter()
        rewards = np.zeros((len(self.rewards.names), 0), np.float32)
        if prompts:
            generations = len(answers.lengths) // len(prompts)
            rewards = self._rewarded([prompt for prompt in prompts for _ in range(generations)], answers)
        return answers, rewards, (sampled - started, time.perf_counter() - sampled)

    def _rewarded(self, prompts: Sequence[PromptExample], answers: SampledAnswers) -> np.ndarray:
        """Return the rewards [functions, N] of answers, each with its prompt."""
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        rows = zip(answers.tokens, answers.lengths, strict=True)
        columns["completion_ids"] = [tokens[:length].tolist() for tokens, length in rows]
        questions = [prompt.question for prompt in prompts]
        completions = [
            text if isinstance(question, str) else [{"role": ASSISTANT, "content": text}]
            for text, question in zip(self.texts(answers), questions, strict=True)
        ]
        return np.asarray(self.rewards(questions, completions, columns, self._check), np.float32)


class RewardEvaluation:
    """Evaluates a model by the rewards of answers that it samples; their randomness is the same in each evaluation.

    `figures` are the means of the last evaluation, by name.
    """

    def __init__(self, sampler: RewardedSampler, config: TrainConfig, world: World):
        self.figures: dict[str, float] = {}
        self._sampler = sampler
        self._config = config
        self._world = world

    def __call__(
        self, order: BatchOrder, batches: int = -1, between: Callable[[int, int], bool] | None = None
    ) -> float | None:
        """Evaluate the first batches of an order of prompts, as Evaluation does.

        Returns minus the mean reward over all ranks, which is the loss that the run lowers: nan without any reward, and
        None if `between` or an interrupted sampling ended it.
        """
        names = names_of(self._sampler.rewards.names)
        total = order.batches_per_epoch if batches == -1 else min(batches, order.batches_per_epoch)
        sums = np.zeros((2, len(names)))
        prompts_of_batches: Iterator[Any] = islice(order.epoch_examples(), total)
        for done, prompts in enumerate(prompts_of_batches, start=1):
            key = iteration_key(self._config.seed, _EVALUATION + done, self._world.rank)
            try:
                if prompts:
                    sums += self._figures(prompts, key)
            except InterruptedSamplingError:
                return None
            if between is not None and between(done, total):
                return None
        self.figures = means(names, self._world.sum_numbers(*sums.ravel().tolist()))
        return -self.figures.get(REWARD, math.nan)

    def _figures(self, prompts: Sequence[PromptExample], key: mx.array) -> np.ndarray:
        answers, rewards, seconds = self._sampler(prompts, key)
        totals = total_rewards(rewards, self._sampler.rewards.weights).reshape(len(prompts), -1)
        return figures(rewards, totals, answers, seconds)
