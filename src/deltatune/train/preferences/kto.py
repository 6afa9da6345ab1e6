"""KTO: each answer is good or bad by itself, and its reward is compared with the model's divergence from the reference.

With r = log p(y|x) - log p_ref(y|x) and z = max(0, mean of the same over answers to other prompts), which estimates the
divergence and has no gradient, the loss of a good answer is 1 - sigmoid(beta (r - z)), and that of a bad one
1 - sigmoid(beta (z - r)) (Ethayarajh et al. 2024, arXiv:2402.01306).
"""

from __future__ import annotations

import mlx.core as mx

from ...options.config import TrainConfig
from .answers import Answers, Scored


def kto(answers: Answers, config: TrainConfig) -> Scored:
    """Return KTO's loss of each answer, with the rewards beta r, and the divergence z."""
    ratios = answers.policy - answers.reference
    other = mx.stop_gradient(ratios[:, 1] * answers.present).sum() / mx.maximum(answers.number, 1.0)
    divergence = mx.maximum(other, 0.0)
    good = answers.desirable
    losses = 1 - mx.sigmoid(config.beta * (2 * good - 1) * (ratios[:, 0] - divergence))
    twice = mx.stack([ratios[:, 0], ratios[:, 0]], axis=1)
    counted = mx.stack([good, 1 - good], axis=1)
    log_probabilities = mx.stack([answers.policy[:, 0], answers.policy[:, 0]], axis=1)
    return Scored(losses, config.beta * twice, log_probabilities, counted, (divergence,))
