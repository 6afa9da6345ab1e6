"""Runs the console script on a pseudo-terminal, and shows the screen that a person sees there."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len

from console import SCRIPT

_PARTS = re.compile(
    r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|([\r\n\x08])|([^\x1b\r\n\x08]+)"
)


@dataclass
class Seen:
    """A program's exit code and output, the lines of its terminal at the end, and the width of the widest ever."""

    code: int
    raw: str
    lines: list[str] = field(default_factory=lambda: [""])
    widest: int = 0

    def __post_init__(self) -> None:
        row = column = 0
        for parameters, letter, control, text in _PARTS.findall(self.raw):
            if control == "\n":
                row += 1
            elif control == "\r":
                column = 0
            elif letter == "A":
                row -= int(parameters or 1)
            elif letter == "K":
                self.lines[row] = self.lines[row][:column] if parameters in ("", "0") else ""
            elif text:
                line = self.lines[row].ljust(column)
                self.lines[row] = line[:column] + text + line[column + len(text) :]
                column += len(text)
                self.widest = max(self.widest, cell_len(self.lines[row].rstrip()))
            self.lines += [""] * (row + 1 - len(self.lines))

    @property
    def text(self) -> str:
        """The lines at the end, as one text."""
        return "\n".join(line.rstrip() for line in self.lines)

    @property
    def words(self) -> str:
        """The words in their order, without borders and breaks of lines."""
        return " ".join(re.sub(r"[│╭╮╰╯─━]", " ", self.text).split())


def on_terminal(*arguments: object, columns: int, cwd: Path, typed: str = "", **variables: str) -> Seen:
    """Run `deltatune ARGUMENT ...` on a terminal of so many columns, which keeps `typed` until it is read."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color"} | variables
    command = [str(SCRIPT), *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=environment, start_new_session=True
    )
    os.close(theirs)
    os.write(ours, typed.encode())
    written = bytearray()
    try:
        while True:
            written += os.read(ours, 65536)
    except OSError:
        pass  # The program has closed its end.
    finally:
        os.close(ours)
    return Seen(process.wait(), written.decode())
