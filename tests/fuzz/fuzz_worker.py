"""Runs commands of deltatune, as this Python has it, in one process; reports each one's end and its opened files.

The parent (fuzz_commands.py) writes a line of JSON for each command, and reads one. It reports a crash or a hang.
"""

import contextlib
import io
import json
import os
import resource
import sys
import traceback
from typing import Any

_WRITES = ("w", "a", "x", "+")
_EVENTS = {
    "os.mkdir": 0,
    "os.rename": 1,
    "os.truncate": 0,
    "os.symlink": 1,
    "os.link": 1,
    "os.remove": 0,
    "os.rmdir": 0,
}
_written: set[str] = set()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook of Python: note every path that is created, changed or removed."""
    path: Any = None
    if event == "open":
        path, mode, flags = arguments
        by_mode = isinstance(mode, str) and any(letter in mode for letter in _WRITES)
        by_flags = mode is None and bool(flags & (os.O_WRONLY | os.O_RDWR))
        path = path if by_mode or by_flags else None
    elif event in _EVENTS:
        path = arguments[_EVENTS[event]]
    if isinstance(path, str | bytes | os.PathLike):
        _written.add(os.path.abspath(os.fsdecode(path)))


class _Terminal(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)

    def text(self) -> str:
        return self.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def run(argv: list[str], stdin: str, folder: str) -> dict[str, Any]:
    """Run one command in a folder; `stdin` is hexadecimal."""
    from deltatune import cli

    os.chdir(folder)
    _written.clear()
    out, err, failed, code = _Terminal(), _Terminal(), None, None
    sys.stdin = io.TextIOWrapper(io.BytesIO(bytes.fromhex(stdin)), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(argv)
        except BaseException:  # noqa: BLE001 (whatever leaves the command line is a finding)
            failed = traceback.format_exc()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "code": code, "out": out.text(), "err": err.text(), "failed": failed, "written": sorted(_written), "peak": peak
    }  # fmt: skip


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What C code or another library prints must not be taken for an answer.
    os.dup2(2, 1)
    sys.addaudithook(_watch)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(run(**json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
