"""The command lines of the programs here, and the processes of their own in which they measure."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
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


class LineProcess:
    """A program that answers each line that it reads with a line of JSON; its first line comes unasked."""

    def __init__(self, name: str, command: list[str], **variables: str) -> None:
        pipe = subprocess.PIPE
        environment = os.environ | variables
        self.name = name
        self.process = subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, env=environment)
        self.first = self._read()

    def ask(self, line: str = "") -> Any:
        """Send a line; returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with exit code {self.process.wait()}")
        return json.loads(line)
