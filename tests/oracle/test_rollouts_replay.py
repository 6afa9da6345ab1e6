"""Advantages, losses and gradients of sampled answers are those that TRL gave on the same rollouts; no torch."""

import numpy as np
import pytest
from parity import rollouts
from parity.rollouts import CASES

from deltatune.options.conditions import changed_options
from deltatune.train import policy_loss

RECORDED = rollouts.recorded()


def differences(name):
    ours, theirs = rollouts.ours(CASES[name]), RECORDED[name]
    advantages = np.abs(np.subtract(ours["advantages"], theirs.advantages)).max()
    gradients = np.abs(np.subtract(ours["gradients"], theirs.gradients)).max() / np.abs(theirs.gradients).max()
    return advantages, abs(ours["loss"] - theirs.loss), gradients


@pytest.mark.parametrize("name", CASES)
def test_advantages_losses_and_gradients_are_those_of_trl(name):
    advantages, loss, gradients = differences(name)
    # TRL divides in fp32 by a deviation of at least 1e-4, and advantages are below 4.
    assert advantages < 2e-6
    assert loss < 1e-5
    assert gradients < 1e-5


def test_every_option_of_the_loss_is_in_a_case():
    names = {"loss_variant", "beta", "epsilon", "epsilon_high", "num_iterations", "temperature"}
    names |= {"scale_rewards", "mask_truncated_completions", "sampler_correction"}
    assert names <= {name for case in CASES.values() for name in changed_options(case.config)}


def test_every_case_has_other_numbers():
    """Each of the options changes the loss, but that of bnpo, which is dapo's within one batch."""
    assert len(CASES) == len(RECORDED)
    assert len({round(case.loss, 7) for case in RECORDED.values()}) == len(RECORDED) - 1


@pytest.mark.any_blas
def test_a_planted_fault_shows(monkeypatch):
    plain = policy_loss.SampledPolicy.logits
    monkeypatch.setattr(
        policy_loss.SampledPolicy, "logits", lambda self, logits: plain(self, logits) * self.temperature
    )
    assert differences("dapo")[2] > 0.01
