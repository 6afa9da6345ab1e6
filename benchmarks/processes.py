"""The command lines of the programs here, and the processes of their own in which they measure."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a program's whole docstring, laid out as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def arguments(parser: argparse.ArgumentParser, worker: Callable[[dict[str, Any]], Any]) -> argparse.Namespace:
    """The command line. In a process that measured() started, print what `worker` returns, as JSON, and end."""
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.worker:
        print(json.dumps(worker(json.loads(found.worker))))
        sys.exit()
    return found


def measured(program: str, options: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Run `program --worker OPTIONS` in a new process with these variables set; returns the JSON of its last line."""
    command = [sys.executable, program, "--worker", json.dumps(options)]
    done = subprocess.run(command, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def ended(command: list[str], seconds: float, **variables: str) -> tuple[int, list[str]]:
    """Run a command, and end it and its children after so many seconds; return its exit code and its output's lines."""
    with tempfile.TemporaryFile("w+") as output:
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env=os.environ | variables, start_new_session=True, **options)
        try:
            process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return process.returncode, output.read().strip().splitlines()


class LineProcess:
    """A program that answers each line that it reads with a line of JSON; its first line comes unasked.

    Of its output, lines that begin with `mark` are read. It runs in `folder`, if that is given.
    """

    def __init__(
        self, name: str, command: list[str], mark: str = "", folder: Path | None = None, **variables: str
    ) -> None:
        self.name, self._mark = name, mark
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": folder}
        self.process = subprocess.Popen([sys.executable, *command], env=os.environ | variables, **options)
        self.first = self._read()

    def ask(self, line: str = "") -> Any:
        """Send a line; returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(self._mark):
                return json.loads(line.removeprefix(self._mark))
        raise RuntimeError(f"{self.name}: its process ended with exit code {self.process.wait()}")
