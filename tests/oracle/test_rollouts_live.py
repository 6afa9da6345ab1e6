"""TRL beside deltatune, run live: losses on recorded rollouts, and thirty updates on recorded answers."""

import numpy as np
import pytest
from parity import rollouts, updates

from deltatune.train.rollouts import rollout_order

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", rollouts.CASES)
def test_trl_gives_the_recorded_numbers_and_ours(name):
    from parity.rollouts_theirs import theirs

    live, recorded, ours = (
        theirs(rollouts.CASES[name]),
        vars(rollouts.recorded()[name]),
        rollouts.ours(rollouts.CASES[name]),
    )
    for key, bound in (("advantages", 2e-6), ("loss", 1e-5), ("gradients", 1e-5)):
        scale = max(np.abs(live[key]).max(), 1.0 if key != "gradients" else 0.0)
        assert np.abs(np.subtract(recorded[key], live[key])).max() <= 1e-6 * scale
        assert np.abs(np.subtract(ours[key], live[key])).max() <= bound * scale


@pytest.mark.parametrize("name", updates.CASES)
def test_thirty_updates_give_the_losses_and_adapters_of_trl(name):
    from parity.updates_theirs import compare

    difference, base = compare(updates.CASES[name])
    # A loss of 0 in every step would compare nothing.
    assert max(map(abs, base.run.losses)) > 0.01
    assert max(difference.loss, difference.gradient, difference.adapter) <= 1e-4, difference


def test_a_planted_fault_shows(monkeypatch):
    """The second pass takes its own log-probabilities for those before the first."""
    from parity.updates_theirs import compare

    monkeypatch.setattr(rollout_order, "needs_old", lambda config: False)
    assert compare(updates.CASES["two passes"])[0].adapter > 1e-3
