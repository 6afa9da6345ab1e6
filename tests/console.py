"""Starts the installed console script in a process of its own, as a user does.

A call within the tests' process does not see what start-up does: which modules are imported, what the environment
holds, which signals are inherited.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: `pip install` writes the script beside the interpreter.
SCRIPT = Path(sys.executable).with_name("deltatune")


def deltatune(
    *arguments: object, cwd: Path | None = None, timeout: float = 300, input: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `deltatune ARGUMENT ...` to its end; return its exit code and output.

    Args:
        arguments: The command and its flags; each is given to str.
        cwd: The directory in which it runs; this process's own by default.
        input: What stands on its standard input; this process's own by default.
        timeout: Seconds after which the process is ended and the test fails.
        variables: Environment variables, beside those of this process.
    """
    command = [str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "120"} | variables
    return subprocess.run(
        command, input=input, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=environment
    )


@contextlib.contextmanager
def started(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program; kill it and close its pipes when the `with` block ends, also where a test fails.

    An open pipe is noticed when Python collects it, which fails the test that happens to run then.

    Args:
        command: The program and its arguments; each is given to str.
        options: What Popen gets besides; pipes for output and errors, and text, by default.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with subprocess.Popen([str(word) for word in command], **options) as process:
        try:
            yield process
        finally:
            process.kill()
