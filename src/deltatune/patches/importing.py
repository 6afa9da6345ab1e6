"""Runs a function right after a module is imported for the first time, before any other module reads a name from it.

patch.py uses it for targets in modules that are not imported yet when the patches are applied.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _Loader(importlib.abc.Loader):
    """Loads a module as the module's own loader does, then calls `then`."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must name its own loader, because inspect and pkgutil read source through that.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls `then` once, when the module `name` has been executed without an error. stop() ends the watch earlier."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._finish)
                return spec
        return None

    def _finish(self) -> None:
        self.stop()
        self._then()

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
