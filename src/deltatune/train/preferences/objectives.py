"""The preference losses, by name: their inputs, results and options, their figures, and the loss of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError
from ...layers import logits_of
from ...models.vision.split import VisionArrays
from ...ops.cross_entropy import linear_token_losses
from ...options.config import TrainConfig

# The arrays of data.preferences.PreferenceBatch that a step reads, by name.
PreferenceArrays = dict[str, mx.array]


class Answers(NamedTuple):
    """The answers of P preferences, some of which may be blank.

    `policy` and `reference` [P, 2] are the log-probabilities of both answers under the model and the reference model,
    and `tokens` [P, 2] the lengths of the answers, 1 for a blank one. `chosen_nll` and `chosen_nll_with_prompt` are
    means of -log p over all tokens of chosen answers, and of these with their prompts. `desirable` and `present` [P]
    are 1 where the first answer is good, and where the preference is not blank, of which there are `number`.
    """

    policy: mx.array
    reference: mx.array
    tokens: mx.array
    chosen_nll: mx.array
    chosen_nll_with_prompt: mx.array
    desirable: mx.array
    present: mx.array
    number: mx.array


class Scored(NamedTuple):
    """The results of a preference loss: the losses [P], and the implicit rewards of good and bad answers [P, 2].

    `counted` [P, 2] is 1 where that reward belongs to a good answer (first column) or a bad one (second); `more` are
    further scalars to report, in the order of the names in Objective.more.
    """

    losses: mx.array
    rewards: mx.array
    log_probabilities: mx.array
    counted: mx.array
    more: tuple[mx.array, ...] = ()


def scored_pairs(answers: Answers, losses: mx.array, rewards: mx.array, more: tuple[mx.array, ...] = ()) -> Scored:
    """Return the results of a loss of pairs, where both answers of every pair count."""
    return Scored(losses, rewards, answers.policy, mx.ones(rewards.shape), more)


def answers_of(losses: mx.array, weights: mx.array, preferences: PreferenceArrays) -> Answers:
    """Sum the tokens' cross-entropies [B, T] of a batch by answer; `weights` [B, T] are 1 in answers, else 0."""
    present, documents = preferences["present"], preferences["documents"]
    tokens, lengths = preferences["tokens"], preferences["lengths"]
    policy = _by_document(-losses * weights, documents, present)
    whole = _by_document(losses, documents, present)
    chosen_tokens, chosen_length = ((numbers[:, 0] * present).sum() for numbers in (tokens, lengths))
    return Answers(
        policy,
        preferences["reference"],
        tokens,
        -(policy[:, 0] * present).sum() / mx.maximum(chosen_tokens, 1.0),
        (whole[:, 0] * present).sum() / mx.maximum(chosen_length, 1.0),
        preferences["desirable"],
        present,
        present.sum(),
    )


def _by_document(values: mx.array, documents: mx.array, present: mx.array) -> mx.array:
    """Sum values [B, T] over the positions of each document; [P, 2]."""
    per_row = 2 * present.size // documents.shape[0]
    here = documents[:, None] == mx.arange(per_row)[None, :, None]
    return mx.where(here, values[:, None], 0.0).sum(axis=-1).reshape(-1, 2)


def smoothed(margins: mx.array, smoothing: float) -> mx.array:
    """Return -(1 - e) log sigmoid(m) - e log sigmoid(-m), the loss where a share e of the pairs is labelled wrongly."""
    loss = -nn.log_sigmoid(margins)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * nn.log_sigmoid(-margins)


def simpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return SimPO's loss of each pair, with the rewards beta a(y).

    SimPO: DPO without a reference model, on mean log-probabilities and with a margin. With a(y) = log p(y|x) / |y| and
    m = beta (a(chosen) - a(rejected)) - gamma, the loss is -log sigmoid(m) (Meng et al. 2024, arXiv:2405.14734). Label
    smoothing e makes it -(1 - e) log sigmoid(m) - e log sigmoid(-m).
    """
    rewards = config.reward_factor * answers.policy / answers.tokens
    margins = rewards[:, 0] - rewards[:, 1] - config.gamma
    return scored_pairs(answers, smoothed(margins, config.label_smoothing), rewards)


def orpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return ORPO's loss of each pair, with the rewards beta a(y), and the NLL.

    ORPO: the likelihood of the chosen text, plus the odds of the chosen answer against the rejected one.
    With a(y) = log p(y|x) / |y| and log odds(y) = a(y) - log(1 - exp a(y)), the loss is NLL - beta log sigmoid(log
    odds(chosen) - log odds(rejected)) (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; their lambda is beta here). NLL
    is the mean of -log p over the tokens of all prompts and chosen answers of the batch, as in the authors' code.
    """
    means = answers.policy / answers.tokens
    log_odds = means - log_complement(means)
    ratio = nn.log_sigmoid(log_odds[:, 0] - log_odds[:, 1])
    nll = answers.chosen_nll_with_prompt
    return scored_pairs(answers, nll - config.reward_factor * ratio, config.reward_factor * means, (nll,))


def log_complement(x: mx.array) -> mx.array:
    """Return log(1 - exp(x)) for x < 0, exact near 0 and far from it; 0 counts as the largest number below it."""
    x = mx.minimum(x, -1e-7)
    near = x > -math.log(2)
    # Each branch gets an argument at which it and its gradient are finite, since mx.where evaluates both.
    return mx.where(near, mx.log(-mx.expm1(mx.where(near, x, -1.0))), mx.log1p(-mx.exp(mx.where(near, -1.0, x))))


def kto(answers: Answers, config: TrainConfig) -> Scored:
    """Return KTO's loss of each answer, with the rewards beta r, and the divergence z.

    KTO: each answer is good or bad by itself, and its reward is compared with the divergence from the reference. With
    r = log p(y|x) - log p_ref(y|x) and z = max(0, mean of the same over answers to other prompts), which estimates the
    divergence and has no gradient, the loss of a good answer is 1 - sigmoid(beta (r - z)), and that of a bad one
    1 - sigmoid(beta (z - r)) (Ethayarajh et al. 2024, arXiv:2402.01306).
    """
    ratios = answers.policy - answers.reference
    other = mx.stop_gradient(ratios[:, 1] * answers.present).sum() / mx.maximum(answers.number, 1.0)
    divergence = mx.maximum(other, 0.0)
    good = answers.desirable
    losses = 1 - mx.sigmoid(config.reward_factor * (2 * good - 1) * (ratios[:, 0] - divergence))
    twice = mx.stack([ratios[:, 0], ratios[:, 0]], axis=1)
    counted = mx.stack([good, 1 - good], axis=1)
    log_probabilities = mx.stack([answers.policy[:, 0], answers.policy[:, 0]], axis=1)
    return Scored(losses, config.reward_factor * twice, log_probabilities, counted, (divergence,))


def cpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return CPO's loss of each pair, with the rewards beta log p(y|x), and the NLL.

    Contrastive preference optimisation: DPO with a uniform reference, plus the likelihood of the chosen answer.

    With m = beta (log p(chosen|x) - log p(rejected|x)), the loss is -log sigmoid(m) + NLL (Xu et al. 2024,
    arXiv:2401.08417). NLL is the mean of -log p over the tokens of all chosen answers of the batch. Label
    smoothing and the forms hinge and ipo are those of DPO; ipo takes mean log-probabilities.
    """
    beta = config.reward_factor
    ipo = config.loss_variant == "ipo"
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


def dpo(answers: Answers, config: TrainConfig) -> Scored:
    """Return DPO's loss of each pair, with the rewards beta r(y).

    Direct preference optimisation: the pair's margin over the reference model is a logit of the better answer.

    With r(y) = log p(y|x) - log p_ref(y|x), summed over the tokens of answer y, and m = beta (r(chosen) - r(rejected)):

    - sigmoid: -log sigmoid(m) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). With label smoothing e it is the
      conservative form, -(1 - e) log sigmoid(m) - e log sigmoid(-m).
    - robust: (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e); its mean over flipped labels is the loss of the
    right ones (Chowdhury et al. 2024, arXiv:2403.00409).
    - hinge: max(0, 1 - m) (Zhao et al. 2023, arXiv:2305.10425).
    - ipo: (r(chosen) / |chosen| - r(rejected) / |rejected| - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036,
      eq. 17), with the mean over tokens that its authors used.
    """
    beta, smoothing = config.reward_factor, config.label_smoothing
    ratios = answers.policy - answers.reference
    rewards = beta * ratios
    margins = rewards[:, 0] - rewards[:, 1]
    if config.loss_variant == "hinge":
        losses = mx.maximum(1 - margins, 0.0)
    elif config.loss_variant == "ipo":
        means = ratios / answers.tokens
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    elif config.loss_variant == "robust":
        clean = -nn.log_sigmoid(margins)
        flipped = -nn.log_sigmoid(-margins)
        losses = ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)
    else:
        losses = smoothed(margins, smoothing)
    return scored_pairs(answers, losses, rewards)


# The figures of every preference loss. The names are TRL's, which people's dashboards know.
_REPORTED = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")
MARGINS = "rewards/margins"


@dataclass(frozen=True)
class Objective:
    """A preference loss: its published forms, whether it needs a reference's log-probabilities, and its own figures."""

    score: Callable[[Answers, TrainConfig], Scored]
    variants: tuple[str, ...] = ("sigmoid",)
    needs_reference: bool = False
    more: tuple[str, ...] = ()

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all that it reports."""
        return (*_REPORTED, *self.more)


OBJECTIVES: dict[str, Objective] = {
    "dpo": Objective(dpo, ("sigmoid", "robust", "hinge", "ipo"), needs_reference=True),
    "orpo": Objective(orpo, more=("nll_loss",)),
    "kto": Objective(kto, needs_reference=True, more=("kl",)),
    "simpo": Objective(simpo),
    "cpo": Objective(cpo, ("sigmoid", "hinge", "ipo"), more=("nll_loss",)),
}


def objective_of(config: TrainConfig) -> Objective | None:
    """Return the preference loss of a run, None for other losses; an option that does not fit it is a UserError."""
    if not config.has_preferences:
        return None
    objective = OBJECTIVES[config.loss]
    if config.beta == 0:
        raise UserError(f"beta: expected a number above 0 with loss {config.loss}, got {config.beta:g}.")
    if config.loss_variant not in (None, *objective.variants):
        known = ", ".join(objective.variants)
        raise UserError(f"loss_variant: {config.loss} has no form {config.loss_variant!r}; expected {known}.")
    if config.mask_prompt is not None:
        raise UserError("mask_prompt: a preference loss always counts answers only; leave --mask-prompt out.")
    return objective


def means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the means by name, with the margin of the chosen over the rejected answers' rewards.

    `sums` are as many sums as names, then how many answers each is the sum of. A figure of no answer is left out.
    """
    counts = sums[len(names) :]
    by_name = {name: value / count for name, value, count in zip(names, sums, counts, strict=False) if count}
    if "rewards/chosen" in by_name and "rewards/rejected" in by_name:
        by_name[MARGINS] = by_name["rewards/chosen"] - by_name["rewards/rejected"]
    return by_name


def line(record: Mapping[str, float], prefix: str = "") -> str:
    """Return the part of a line of progress on the figures in `record`, or an empty text if it has none."""
    names = {"margin": MARGINS, "accuracy": "rewards/accuracies", "reward": "reward", "exact": "rewards/exact"}
    names |= {"sampled": "sampled/share", "length": "completions/mean_length", "entropy": "entropy", "kl": "kl"}
    names |= {"mtp loss": "mtp_loss", "accepted": "mtp_accepted"}
    shown = {word: f"{prefix}{name}" for word, name in names.items()}
    return "".join(f", {word} {record[name]:.3f}" for word, name in shown.items() if name in record)


# (inputs [B, T], targets [B, T], and a vision model's images) -> the cross-entropy of every target, [B, T] in fp32.
TokenLosses = Callable[..., mx.array]


def chunked_token_losses(
    backbone: Callable[..., mx.array], head: nn.Module | Callable[[mx.array], mx.array]
) -> TokenLosses:
    """Return the tokens' losses of a model in two parts; the logits of all tokens are never held at once.

    `backbone` maps inputs [B, T] (and images) to hidden states [B, T, D], and `head` those to logits.
    """

    def losses(inputs: mx.array, targets: mx.array, *images: VisionArrays) -> mx.array:
        hidden = backbone(inputs, *images)
        if not images or "counted" not in images[0]:
            return linear_token_losses(head, hidden, targets)
        at = images[0]["counted"]
        counted_losses = linear_token_losses(head, hidden.reshape(-1, hidden.shape[-1])[at], targets.reshape(-1)[at])
        return mx.put_along_axis(mx.zeros(targets.size), at, counted_losses, axis=0).reshape(targets.shape)

    return losses


def full_token_losses(model: nn.Module) -> TokenLosses:
    """Return the tokens' losses of a model with a head that cannot be split off, from all of its logits at once."""

    def losses(inputs: mx.array, targets: mx.array) -> mx.array:
        return nn.losses.cross_entropy(logits_of(model, inputs).astype(mx.float32), targets)

    return losses


def preference_loss(
    token_losses: TokenLosses, objective: Objective, config: TrainConfig
) -> Callable[..., tuple[mx.array, mx.array, mx.array]]:
    """Make a loss function for the training step.

    It takes inputs, targets, weights, a vision model's images, and at the end the arrays of the batch's preferences. It
    returns the sum of the preferences' losses, their number, and [2, figures]: the sums of the figures in
    objective.figures, and of how many answers each is the sum.
    """

    def loss(
        inputs: mx.array, targets: mx.array, weights: mx.array, *more: PreferenceArrays
    ) -> tuple[mx.array, mx.array, mx.array]:
        *images, preferences = more
        losses = token_losses(inputs, targets, *images)
        answers = answers_of(losses, weights, preferences)
        scored = objective.score(answers, config)
        present = answers.present
        # A blank preference counts nothing, and an infinite loss of one must not become NaN.
        total = mx.where(present > 0, scored.losses, 0.0).sum()
        # mlx.compile fails if an output is computed twice, so the count is computed in one place.
        return total, answers.number, mx.stop_gradient(_figures(scored, present))

    return loss


def _figures(scored: Scored, present: mx.array) -> mx.array:
    """Return sums and counts of the reported figures, [2, figures]."""
    counted = scored.counted * present[:, None]
    both = counted[:, 0] * counted[:, 1]
    chosen, rejected = counted[:, 0], counted[:, 1]
    right = (scored.rewards[:, 0] > scored.rewards[:, 1]).astype(mx.float32)
    values = (
        (scored.rewards[:, 0], chosen),
        (scored.rewards[:, 1], rejected),
        (right, both),
        (scored.log_probabilities[:, 0], chosen),
        (scored.log_probabilities[:, 1], rejected),
        *((figure, present) for figure in scored.more),
    )
    return mx.stack([mx.stack([(value * weight).sum(), weight.sum()]) for value, weight in values], axis=1)
