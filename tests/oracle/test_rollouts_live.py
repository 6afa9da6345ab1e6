"""TRL beside deltatune on recorded rollouts, run live. `make oracle`; fails where trl is absent."""

import numpy as np
import pytest
from parity import rollouts
from parity.rollouts import CASES

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", CASES)
def test_trl_gives_the_recorded_numbers_and_ours(name):
    from parity.rollouts_theirs import theirs

    live, recorded, ours = theirs(CASES[name]), vars(rollouts.recorded()[name]), rollouts.ours(CASES[name])
    for key, bound in (("advantages", 2e-6), ("loss", 1e-5), ("gradients", 1e-5)):
        scale = max(np.abs(live[key]).max(), 1.0 if key != "gradients" else 0.0)
        assert np.abs(np.subtract(recorded[key], live[key])).max() <= 1e-6 * scale
        assert np.abs(np.subtract(ours[key], live[key])).max() <= bound * scale
