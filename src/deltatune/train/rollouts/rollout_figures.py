"""The figures of a sampling, under TRL's names, and the advantages that its rewards give, with TRL's formulas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from .answer_sampler import SampledAnswers

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
