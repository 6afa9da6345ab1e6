"""Tells whether this process is the command line, and lets Ctrl-C end it quietly while modules are still imported."""

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
