"""The figures of a sampling: rewards, lengths, entropy and times, under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .advantages import deviation, mean
from .answer_sampler import SampledAnswers

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
