"""Every test of the tables begins and ends without patches."""

from __future__ import annotations

import pytest

from deltatune.patches import revert


@pytest.fixture(autouse=True)
def _revert():
    yield
    revert()
