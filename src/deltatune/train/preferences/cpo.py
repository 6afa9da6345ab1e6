"""Contrastive preference optimisation: DPO with a uniform reference, plus the likelihood of the chosen answer.

With m = beta (log p(chosen|x) - log p(rejected|x)), the loss is -log sigmoid(m) + NLL (Xu et al. 2024,
arXiv:2401.08417). NLL is the mean of -log p over the tokens of all chosen answers of the batch. Label
smoothing and the forms hinge and ipo are those of DPO; ipo takes mean log-probabilities.
"""

from __future__ import annotations

import mlx.core as mx

from ...options.config import TrainConfig
from .answers import Answers, Scored, scored_pairs, smoothed


def cpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return CPO's loss of each pair, with the rewards beta log p(y|x), and the NLL."""
    beta, ipo = config.beta, config.loss_variant == "ipo"
    scores = answers.policy / answers.tokens if ipo else answers.policy
    margins = scores[:, 0] - scores[:, 1]
    if ipo:
        losses = (margins - 1 / (2 * beta)).square()
    elif config.loss_variant == "hinge":
        losses = mx.maximum(1 - beta * margins, 0.0)
    else:
        losses = smoothed(beta * margins, config.label_smoothing)
    nll = answers.chosen_nll
    return scored_pairs(answers, losses + nll, beta * scores, (nll,))
