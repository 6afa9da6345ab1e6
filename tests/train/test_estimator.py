"""The expected gradient of the loss is the exact policy gradient, at any temperature and within top_k, by enumeration.

The policy is a table of logits: one row for the first token, and one behind each first token. All answers of two tokens
are enumerated, so the expectation over samples is a sum.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from deltatune.models.generate import SampledPolicy
from deltatune.options.config import TrainConfig
from deltatune.train.policy_loss import rollout_loss

VOCABULARY = 5
LOGITS = np.random.default_rng(0).normal(0, 1.2, (VOCABULARY + 1, VOCABULARY)).astype(np.float32)
ANSWERS = np.array(list(itertools.product(range(VOCABULARY), repeat=2)), np.int32)
REWARDS = np.random.default_rng(1).uniform(0, 1, len(ANSWERS)).astype(np.float32)
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.3},
]


def log_probabilities(logits, policy):
    """The log-probabilities [N, 2] of the tokens of every answer; that of a token that is never sampled is -1e30."""
    rows = mx.stack([mx.broadcast_to(logits[0], (len(ANSWERS), VOCABULARY)), logits[mx.array(ANSWERS[:, 0] + 1)]], 1)
    of_policy = policy.logits(rows)
    chosen = mx.take_along_axis(of_policy, mx.array(ANSWERS)[..., None], axis=-1)[..., 0]
    return chosen - mx.logsumexp(of_policy, axis=-1)


def exact_gradient(settings):
    """The gradient of the expected reward, by differentiating the expectation itself."""

    def expected(logits):
        return (mx.exp(log_probabilities(logits, SampledPolicy(**settings)).sum(-1)) * mx.array(REWARDS)).sum()

    return np.array(mx.grad(expected)(mx.array(LOGITS)))


def expected_gradient(settings, scored):
    """The expectation, over samples at `settings`, of the gradient of the loss of answers that `scored` scores."""
    config = TrainConfig(loss="grpo", loss_variant="dr_grpo", max_completion_length=2, max_seq_length=8, **settings)
    sampled = np.array(log_probabilities(mx.array(LOGITS), SampledPolicy(**settings)), np.float64)
    probabilities = np.exp(sampled.sum(-1))
    assert abs(probabilities.sum() - 1) < 1e-5
    baseline = (probabilities * REWARDS).sum()
    # An answer that is never sampled has no place in the expectation.
    possible = probabilities > 0
    weights = np.where(possible, probabilities, 0)[:, None].repeat(2, 1)
    rollouts = {
        "advantages": mx.array((REWARDS - baseline).astype(np.float32)[:, None].repeat(2, 1)),
        "sampled": mx.array(np.where(possible[:, None], sampled, 0).astype(np.float32)),
        "total": mx.array(1.0),
        "figures": mx.zeros((2, 1)),
    }

    def loss(logits):
        def token_losses(_inputs, _targets):
            return -log_probabilities(logits, SampledPolicy(**scored))

        targets = mx.array(ANSWERS)
        of_answers = rollout_loss(token_losses, config)
        return of_answers(targets, targets, mx.array(weights.astype(np.float32)), rollouts)[0]

    return -np.array(mx.grad(loss)(mx.array(LOGITS)))


def apart(settings, scored):
    exact, expected = exact_gradient(settings), expected_gradient(settings, scored)
    return np.abs(expected - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_expected_gradient_is_the_exact_one(settings):
    assert apart(settings, settings) < 1e-5


@pytest.mark.parametrize("settings", [one for one in SETTINGS if one != {"temperature": 1.0}], ids=str)
def test_scoring_the_plain_model_is_another_gradient(settings):
    """As trainers do that sample at a temperature, or within top_k, and score without them."""
    assert apart(settings, {}) > 0.02
    if len(settings) > 1:
        assert apart(settings, {"temperature": settings["temperature"]}) > 0.02
