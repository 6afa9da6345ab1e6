"""ORPO: the likelihood of the chosen text, plus the odds of the chosen answer against the rejected one.

With a(y) = log p(y|x) / |y| and log odds(y) = a(y) - log(1 - exp a(y)), the loss is NLL - beta log sigmoid(log
odds(chosen) - log odds(rejected)) (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; their lambda is beta here). NLL is
the mean of -log p over the tokens of all prompts and chosen answers of the batch, as in the authors' code.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from ...options.config import TrainConfig
from .answers import Answers, Scored, scored_pairs


def orpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return ORPO's loss of each pair, with the rewards beta a(y), and the NLL."""
    means = answers.policy / answers.tokens
    log_odds = means - log_complement(means)
    ratio = nn.log_sigmoid(log_odds[:, 0] - log_odds[:, 1])
    nll = answers.chosen_nll_with_prompt
    return scored_pairs(answers, nll - config.beta * ratio, config.beta * means, (nll,))


def log_complement(x: mx.array) -> mx.array:
    """Return log(1 - exp(x)) for x < 0, exact near 0 and far from it; 0 counts as the largest number below it."""
    x = mx.minimum(x, -1e-7)
    near = x > -math.log(2)
    # Each branch gets an argument at which it and its gradient are finite, since mx.where evaluates both.
    return mx.where(near, mx.log(-mx.expm1(mx.where(near, x, -1.0))), mx.log1p(-mx.exp(mx.where(near, -1.0, x))))
