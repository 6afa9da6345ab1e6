"""Live comparisons run under `pytest -m oracle` alone; the replays of their recordings, always."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "oracle" in config.getoption("markexpr"):
        return
    live = [item for item in items if item.get_closest_marker("oracle")]
    config.hook.pytest_deselected(items=live)
    items[:] = [item for item in items if item not in live]
