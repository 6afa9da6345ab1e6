"""The loss of sampled answers: a policy gradient under the distribution that sampled them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from ..errors import UserError
from ..models.generate import EXCLUDED, SampledPolicy
from ..options.config import TrainConfig
from .preferences.objectives import TokenLosses

DAPO = "dapo"
GRPO = "grpo"
DR_GRPO = "dr_grpo"
BNPO = "bnpo"
GSPO = "gspo"
CISPO = "cispo"
RLOO = "rloo"
VARIANTS = (DAPO, GRPO, DR_GRPO, BNPO, GSPO, CISPO, RLOO)
# The variants with one ratio of probabilities for each answer, and those that are a mean over answers.
BY_ANSWER = (GSPO, RLOO)
MEAN_OF_ANSWERS = (GRPO, GSPO, RLOO)
# The largest weight of a token, or of an answer, by which the loss corrects the sampler.
LARGEST_CORRECTION = 2.0
# The figures under TRL's names, where it has them.
KL = "kl"
CLIPPED = "clip_ratio/region_mean"
_DIFFERENCE = "sampling/sampling_logp_difference"
_FIGURES = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    CLIPPED,
    f"{_DIFFERENCE}/mean",
    f"{_DIFFERENCE}/max",
    "sampling/kl",
    "sampling/importance_sampling_ratio/mean",
    "sampling/outside",
)

Arrays = Mapping[str, mx.array]


def variant_of(config: TrainConfig) -> str:
    """Return the variant of the loss; an option that does not fit it is a UserError."""
    variant = config.loss_variant or DAPO
    if variant not in VARIANTS:
        raise UserError(f"loss_variant: grpo has no form {variant!r}; expected {', '.join(VARIANTS)}.")
    if variant == CISPO and config.epsilon_high is None:
        raise UserError("epsilon_high: cispo needs the largest ratio of probabilities of a token; give one, such as 5.")
    if config.pack and (variant in BY_ANSWER or config.sampler_correction == "sequence"):
        name = f"loss_variant: {variant}" if variant in BY_ANSWER else "sampler_correction: sequence"
        raise UserError(f"pack: {name} weighs whole answers, each of which needs a row of its own; leave pack out.")
    policy = SampledPolicy.of(config)
    if config.beta and policy != SampledPolicy(config.temperature):
        raise UserError(
            "beta: the reference may give a sampled token no probability at all within its own top_p, top_k or min_p, "
            "so the divergence is infinite; leave these out, or beta."
        )
    if config.beta and config.trains_base is not None:
        raise UserError(
            f"beta: the reference is the model without its adapter, and {config.trains_base}; leave beta out."
        )
    return variant


def figures_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the names of the figures of a step."""
    return (KL, *_FIGURES) if _scores_reference(config) else _FIGURES


def needs_old(config: TrainConfig) -> bool:
    """Whether the loss needs the log-probabilities before the first update by themselves.

    One pass through the answers has ratios of exactly 1; rloo takes the divergence from the rewards.
    """
    return config.num_iterations > 1 or (bool(config.beta) and config.loss_variant == RLOO)


def _scores_reference(config: TrainConfig) -> bool:
    """Whether the loss has a divergence from the reference; rloo takes it from the rewards."""
    return bool(config.beta) and config.loss_variant != RLOO


def rollout_loss(token_losses: TokenLosses, config: TrainConfig) -> Callable[..., tuple[mx.array, ...]]:
    """Make a loss function for the training step (trl.GRPOTrainer and trl.RLOOTrainer 1.16).

    It takes inputs [B, T], targets [B, T], weights [B, T], which are those of the tokens' losses in the sum, a vision
    model's images, and the arrays of a RolloutBatch. It returns the sum, the number that it is to be divided by, and
    [2, figures], the sums of figures_of(config) and those of the batch behind them. `token_losses` are those under the
    sampled policy.
    """
    variant_of(config)

    def loss(inputs: mx.array, targets: mx.array, weights: mx.array, *more: Arrays) -> tuple[mx.array, ...]:
        *images, rollouts = more
        sampled = rollouts["sampled"]
        mask = (weights > 0).astype(mx.float32)
        log_p = -token_losses(inputs, targets, *images)
        # The trainer rounds otherwise than the sampler, so a token at the edge of top_p may be outside here.
        outside = mask * (log_p < EXCLUDED / 2)
        log_p = mx.where((mask > 0) & (outside == 0), log_p, sampled)
        old = rollouts.get("old", mx.stop_gradient(log_p))
        old = mx.where(old < EXCLUDED / 2, sampled, old)
        log_ratio = _by_answer(log_p - old, mask, config)
        ratio = mx.exp(log_ratio)
        losses = _policy_losses(ratio, log_p, rollouts["advantages"], config)
        correction = _correction(old - sampled, mask, config)
        losses = losses * correction
        divergence: list[mx.array] = []
        if _scores_reference(config):
            difference = rollouts["reference"] - log_p
            divergence.append((mx.exp(difference) - difference - 1) * ratio)
            losses = losses + config.beta * divergence[0]  # type: ignore[operator]
        total = (losses * weights).sum()
        above = ratio > 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
        clipped = (ratio < 1 - config.epsilon, above)
        figures = _figures(divergence, clipped, rollouts, old - sampled, correction, outside, mask)
        return total, rollouts["total"], mx.stop_gradient(mx.concatenate([figures, rollouts["figures"]], axis=1))

    return loss


def _by_answer(log_ratio: mx.array, mask: mx.array, config: TrainConfig) -> mx.array:
    """Return the logarithm of the ratio of each token, [B, T], or of each answer, [B, 1]."""
    if config.loss_variant not in BY_ANSWER:
        return log_ratio
    total = (log_ratio * mask).sum(axis=-1, keepdims=True)
    if config.loss_variant == RLOO:
        return total
    return total / mx.maximum(mask.sum(axis=-1, keepdims=True), 1.0)


def _policy_losses(ratio: mx.array, log_p: mx.array, advantages: mx.array, config: TrainConfig) -> mx.array:
    """Return the loss of each token before any correction, [B, T] or [B, 1]."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_variant == CISPO:
        return -mx.stop_gradient(mx.minimum(ratio, high)) * advantages * log_p
    clipped = mx.clip(ratio, 1 - config.epsilon, 1 + high)
    return -mx.minimum(ratio * advantages, clipped * advantages)


def _correction(difference: mx.array, mask: mx.array, config: TrainConfig) -> mx.array:
    """Return the weights that correct the sampler, [B, T], or [B, 1] for answers.

    `difference` [B, T] are the log-probabilities in training less those in sampling; `mask` is 1 where a token counts.
    """
    if config.sampler_correction == "none":
        return mx.ones((1, 1))
    if config.sampler_correction == "sequence":
        difference = (difference * mask).sum(axis=-1, keepdims=True)
    return mx.stop_gradient(mx.minimum(mx.exp(difference), LARGEST_CORRECTION))


def _figures(
    divergence: list[mx.array],
    clipped: tuple[mx.array, mx.array],
    rollouts: Arrays,
    difference: mx.array,
    correction: mx.array,
    outside: mx.array,
    mask: mx.array,
) -> mx.array:
    """Return sums and counts of the figures of a step, [2, figures]."""
    advantages = rollouts["advantages"]
    low = clipped[0] & (advantages < 0)
    high = clipped[1] & (advantages > 0)
    tokens = mask.sum()
    present = (tokens > 0).astype(mx.float32)
    difference = difference * mask
    apart = mx.exp(-difference) + difference - 1
    values = [*divergence, low, high, low | high, mx.abs(difference), apart, correction, outside]
    sums = [(value.astype(mx.float32) * mask).sum() for value in values]
    counts = [tokens for _ in values]
    # The largest difference of a batch; a report shows the mean over batches.
    at = len(divergence) + 4
    sums.insert(at, mx.abs(difference).max())
    counts.insert(at, present)
    return mx.stack([mx.stack(sums), mx.stack(counts)])
