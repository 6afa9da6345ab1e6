"""Tells whether this process is the command line, lets Ctrl-C end it quietly, and starts modules as bare programs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def is_command_line() -> bool:
    """Whether this process was started as `deltatune ...` or `python -m deltatune ...`."""
    # While Python looks for the module of -m, the program is called -m.
    if sys.argv[:1] == ["-m"]:
        following = zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
        return any(flag.startswith("-") and flag.endswith("m") and name == "deltatune" for flag, name in following)
    program = Path(sys.argv[0]) if sys.argv else Path()
    # Afterwards it is called by the path of __main__.py.
    return (program.parent.name if program.name == "__main__.py" else program.stem) == "deltatune"


def end_at_signals() -> None:
    """Let Ctrl-C end the command line at once: an exception amid an import would show a traceback, or get lost."""
    if is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as in any Python program, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# The folder of the module becomes a package of its own, without the packages around it.
_START = """
import importlib, sys, types
package = types.ModuleType("bare_program")
package.__path__ = [sys.argv[1]]
sys.modules["bare_program"] = package
importlib.import_module("bare_program." + sys.argv[2]).main(*sys.argv[3:])
"""


def bare_program(module: Path, *arguments: object) -> list[str]:
    """Return the words of a command that calls main(*arguments) of a file, which imports only files beside it."""
    return [sys.executable, "-P", "-u", "-c", _START, str(module.parent), module.stem, *map(str, arguments)]
