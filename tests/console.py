"""Starts the installed console script in a process of its own, as a user does, or calls a command within this one.

A call does not see the effects of start-up: imported modules, the environment, inherited signals. It saves the second
of processor time that a process needs for its imports.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

#: `pip install` writes the script beside the interpreter.
SCRIPT = Path(sys.executable).with_name("deltatune")


def deltatune(
    *arguments: object, cwd: Path | None = None, timeout: float = 300, input: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `deltatune ARGUMENT ...` for at most `timeout` seconds; `variables` stand beside this process's own."""
    command = [str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "120"} | variables
    return subprocess.run(
        command, input=input, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=environment
    )


def cache_of(folder: Path) -> str:
    """Return `folder` as a cache that has the prepared OpenBLAS alone: to prepare it takes a process seconds."""
    from deltatune.machine.environment import cache_directory

    (folder / "blas").mkdir(parents=True, exist_ok=True)
    for file in (cache_directory() / "blas").glob("libopenblas-*"):
        (folder / "blas" / file.name).symlink_to(file)
    return str(folder)


def called(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `deltatune ARGUMENT ...` within this process, for tests of a command's function; return its outcome too."""
    from deltatune import cli

    words, out, err = [*map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, {"COLUMNS": "120"} | variables),
    ):
        code = cli.main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


CALLS = """
import json, sys
from console import called
print(json.dumps([vars(called(*words)) for words in json.loads(sys.argv[1])]))
"""


def called_elsewhere(
    *commands: Sequence[object], PYTHONPATH: str, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands one after another in a process of their own, which imports from the folder PYTHONPATH first."""
    given = json.dumps([[str(word) for word in words] for words in commands])
    variables["PYTHONPATH"] = os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])
    command = [sys.executable, "-c", CALLS, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return [subprocess.CompletedProcess(**each) for each in json.loads(done.stdout.splitlines()[-1])]


@contextlib.contextmanager
def started(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program; kill it and close its pipes when the `with` block ends, also where a test fails.

    An open pipe is noticed when Python collects it, which fails the test that runs then. `options` are those of Popen.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with subprocess.Popen([str(word) for word in command], **options) as process:
        try:
            yield process
        finally:
            process.kill()
