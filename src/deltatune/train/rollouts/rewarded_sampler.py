"""Samples answers and rewards them: for the batches of a run, and for its evaluations."""

from __future__ import annotations

import math
import time
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
from .rollout_figures import REWARD, figures, names_of, total_rewards

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
