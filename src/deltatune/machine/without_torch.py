"""Lets Python's finders of modules pass over PyTorch, as if it were not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _WithoutTorch:
    """A finder in sys.meta_path that finds all modules of another one, except PyTorch."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name == "torch" else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        # importlib.metadata and importlib.invalidate_caches ask finders for more.
        return getattr(self._finder, name)


def hide_torch() -> None:
    """Let imports of PyTorch fail, and importlib.util.find_spec return None for it; do nothing if it is imported.

    An entry None in sys.modules would do the same in one line. But packages such as datasets and SciPy import whatever
    has an entry there, and that import would then fail.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        sys.meta_path[:] = [_WithoutTorch(finder) for finder in sys.meta_path]
