"""TRL's trainer beside deltatune over thirty updates on recorded answers, run live. `make oracle`."""

import pytest
from parity.updates import CASES

from deltatune.train.rollouts import rollout_order

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers, PEFT and TRL.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("name", CASES)
def test_thirty_updates_give_the_losses_and_adapters_of_trl(name):
    from parity.updates_theirs import compare

    difference, base = compare(CASES[name])
    # A loss of 0 in every step would compare nothing.
    assert max(map(abs, base.run.losses)) > 0.01
    assert max(difference.loss, difference.gradient, difference.adapter) <= 1e-4, difference


def test_a_planted_fault_shows(monkeypatch):
    """The second pass takes its own log-probabilities for those before the first."""
    from parity.updates_theirs import compare

    monkeypatch.setattr(rollout_order, "needs_old", lambda config: False)
    assert compare(CASES["two passes"])[0].adapter > 1e-3
