"""Turns the rewards of sampled answers into advantages, with TRL's formulas."""

from __future__ import annotations

import warnings

import numpy as np

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
