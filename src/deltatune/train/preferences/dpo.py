"""Direct preference optimisation: the pair's margin over the reference model is a logit of the better answer.

With r(y) = log p(y|x) - log p_ref(y|x), summed over the tokens of answer y, and m = beta (r(chosen) - r(rejected)):

- sigmoid: -log sigmoid(m) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). With label smoothing e it is the
  conservative form, -(1 - e) log sigmoid(m) - e log sigmoid(-m).
- robust: (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e); its mean over flipped labels is the loss of the
right ones (Chowdhury et al. 2024, arXiv:2403.00409).
- hinge: max(0, 1 - m) (Zhao et al. 2023, arXiv:2305.10425).
- ipo: (r(chosen) / |chosen| - r(rejected) / |rejected| - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, eq. 17),
  with the mean over tokens that its authors used.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ...options.config import TrainConfig
from .answers import Answers, Scored, scored_pairs, smoothed


def dpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return DPO's loss of each pair, with the rewards beta r(y)."""
    beta, smoothing = config.beta, config.label_smoothing
    ratios = answers.policy - answers.reference
    rewards = beta * ratios
    margins = rewards[:, 0] - rewards[:, 1]
    if config.loss_variant == "hinge":
        losses = mx.maximum(1 - margins, 0.0)
    elif config.loss_variant == "ipo":
        means = ratios / answers.tokens
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    elif config.loss_variant == "robust":
        clean, flipped = -nn.log_sigmoid(margins), -nn.log_sigmoid(-margins)
        losses = ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)
    else:
        losses = smoothed(margins, smoothing)
    return scored_pairs(answers, losses, rewards)
