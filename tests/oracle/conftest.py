"""Live comparisons run under `pytest -m oracle` alone; the replays of their recordings, always."""

from pathlib import Path

import pytest

from deltatune.demo.assets import MODEL
from deltatune.models.load import load

# Raised inside transformers, PEFT, TRL and lm-eval.
IGNORED = [f"ignore::{name}Warning" for name in ("Future", "User", "Runtime", "Deprecation")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    live = [item for item in items if item.get_closest_marker("oracle")]
    for item in live:
        item.add_marker(pytest.mark.filterwarnings(*IGNORED))
    if "oracle" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item not in live]


@pytest.fixture
def saves(monkeypatch):
    """The script's folder is on the path for a test alone: other folders have modules of the same names."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "families")


@pytest.fixture(scope="module")
def tokenizer():
    return load(MODEL).tokenizer
