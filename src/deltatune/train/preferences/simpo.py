"""SimPO: DPO without a reference model, on mean log-probabilities and with a margin.

With a(y) = log p(y|x) / |y| and m = beta (a(chosen) - a(rejected)) - gamma, the loss is -log sigmoid(m) (Meng et al.
2024, arXiv:2405.14734). Label smoothing e makes it -(1 - e) log sigmoid(m) - e log sigmoid(-m).
"""

from __future__ import annotations

from ...options.config import TrainConfig
from .answers import Answers, Scored, scored_pairs, smoothed


def simpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return SimPO's loss of each pair, with the rewards beta a(y)."""
    rewards = config.beta * answers.policy / answers.tokens
    margins = rewards[:, 0] - rewards[:, 1] - config.gamma
    return scored_pairs(answers, smoothed(margins, config.label_smoothing), rewards)
