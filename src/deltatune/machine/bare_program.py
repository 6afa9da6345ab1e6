"""Starts a module of deltatune in a process that imports neither deltatune nor MLX, and so starts fast."""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of the module becomes a package of its own, without the packages around it.
_START = """
import importlib, sys, types
package = types.ModuleType("bare_program")
package.__path__ = [sys.argv[1]]
sys.modules["bare_program"] = package
importlib.import_module("bare_program." + sys.argv[2]).main(*sys.argv[3:])
"""


def command(module: Path, *arguments: object) -> list[str]:
    """Return the words of a command that calls main(*arguments) of a file, which imports only files beside it."""
    return [sys.executable, "-P", "-u", "-c", _START, str(module.parent), module.stem, *map(str, arguments)]
