"""Live comparisons run under `pytest -m oracle` alone; the replays of their recordings, always."""

from __future__ import annotations

import pytest

# Raised inside transformers, PEFT, TRL and lm-eval.
IGNORED = [f"ignore::{name}Warning" for name in ("Future", "User", "Runtime", "Deprecation")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    live = [item for item in items if item.get_closest_marker("oracle")]
    for item in live:
        item.add_marker(pytest.mark.filterwarnings(*IGNORED))
    if "oracle" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item not in live]
