"""Every test of the tables begins and ends without patches."""

import pytest

from deltatune.patches.patch import revert


@pytest.fixture(autouse=True)
def _revert():
    yield
    revert()
