"""Checks of one installed set of mlx, mlx-lm and mlx-vlm: `make compat` runs them in an environment for each set.

They run under `pytest -m compat` alone. With Metal declared present (`-p metal_present`) only test_on_metal.py does.
"""

from pathlib import Path

import metal
import pytest

from deltatune.patches.patch import revert


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    on_metal = collection_path.name == "test_on_metal.py"
    if collection_path.name.startswith("test_") and on_metal != metal.declared():
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "compat" in config.getoption("markexpr"):
        return
    ours = [item for item in items if item.get_closest_marker("compat")]
    config.hook.pytest_deselected(items=ours)
    items[:] = [item for item in items if item not in ours]


@pytest.fixture(autouse=True)
def _upstream_alone(monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.delenv("DELTATUNE_ATTENTION", raising=False)
    if metal.declared():
        # The fused kernels need a machine that has Metal.
        monkeypatch.setenv("DELTATUNE_GATED_DELTA", "chunk")
        monkeypatch.setenv("DELTATUNE_ATTENTION", "blocked")
    yield
    revert()
