"""Starts, asks and ends the process of one reward function, without ever waiting for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..machine.command_line import bare_program
from .reward_process import HEADER

# The last bytes of the output of a function that are shown.
_SHOWN = 2000


class RewardChild:
    """The process of a reward function, which a request starts where it does not run.

    `name` is the function's in reports and `label` in messages. `target` and `argument` are the file and the function
    in it, or a built-in name and the text behind it. `waits` says whether a reply is to come; `reply` is the last one,
    as reward_process.py writes it, or {"error": how the process ended}; `row` is the row that the function had read
    last, counted from 1, and 0 where it had read none, or all.
    """

    def __init__(self, name: str, label: str, target: str, argument: str):
        self.name = name
        self.label = label
        self._function = target, argument
        self.waits = False
        self.reply: dict[str, Any] = {}
        self.row = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._output = self._line = b""

    @property
    def runs(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def ask(self, request: bytes) -> None:
        """Send a request; an empty one loads the function alone."""
        if not self.runs:
            self.end()
            self._start()
        self._request.truncate(0)
        os.pwrite(self._request.fileno(), bytes(HEADER) + request, 0)
        with contextlib.suppress(BrokenPipeError):
            self._pipes[0].write(b"\n")
        self.waits = True

    def _start(self) -> None:
        self._request = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (end() closes it)
        program = Path(__file__).with_name("reward_process.py")
        pipe = subprocess.PIPE
        # The group of a session of its own is killed whole, and Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(
            bare_program(program, *self._function, self._request.fileno()),
            stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, pass_fds=[self._request.fileno()], start_new_session=True,
        )  # fmt: skip
        self._pipes: list[Any] = [self._process.stdin, self._process.stdout, self._process.stderr]
        for readable in self.pipes:
            os.set_blocking(readable.fileno(), False)

    @property
    def pipes(self) -> list[Any]:
        """The pipes on which the reply and output may come."""
        return self._pipes[1:] if self._process is not None else []

    def read(self) -> None:
        """Read all that has come, and note where the process has ended."""
        # Looked at first: all that the process wrote before its end can then be read.
        runs = self.runs
        replies, output = self.pipes
        self._output = (self._output + (output.read(1 << 16) or b""))[-_SHOWN:]
        while piece := replies.read(1 << 16):
            self._line += piece
        if self._line.endswith(b"\n"):
            self._take(json.loads(self._line))
        elif not runs:
            assert self._process is not None
            status = self._process.returncode
            self.fail(f"ended its process ({f'exit code {status}' if status >= 0 else signal.Signals(-status).name})")

    def fail(self, error: str) -> None:
        """End the process, and take `error` for its reply."""
        self._take({"error": error})
        self.end()

    def _take(self, reply: dict[str, Any]) -> None:
        self.reply = reply
        self.row = int.from_bytes(os.pread(self._request.fileno(), HEADER, 0), sys.byteorder)
        self.waits = False
        self._line = b""

    def printed(self) -> str:
        """Return the end of the output since the last call."""
        text = self._output.decode("utf-8", "replace").strip()
        self._output = b""
        return text

    def end(self) -> None:
        """End the process with all that it has started in its group."""
        self.waits = False
        self._line = b""
        if self._process is None:
            return
        # macOS refuses to signal a group of which only the ended process is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for file in (*self._pipes, self._request):
            file.close()
        self._process.wait()
        self._process = None
