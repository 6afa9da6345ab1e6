"""Runs commands in a worker process, and decides whether one ended as every command must."""

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from console import cache_of

WORKER = Path(__file__).with_name("fuzz_worker.py")
# Of the exit codes, 1 is the answer no: to plan, that the run does not fit; to doctor, that it would train wrong.
_MAY_SAY_NO = ("plan", "doctor")
# Seconds of processor time, and of standing still: how long a command takes depends on what else runs.
_SECONDS, _GIGABYTES = 180, 6
_WAITS = 40


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, its output on the two streams, and the files that it opened to write."""

    argv: list[str]
    code: int | None
    out: str
    err: str
    failed: str | None
    written: list[str]
    peak: int


class Commands:
    """A worker process that runs commands one after another, started anew when it dies; `home` is for its caches."""

    def __init__(self, home: Path):
        self.home = home
        self.temporary = home / "temporary"
        self.own = [home / "cache", home / "home", self.temporary]
        for folder in self.own:
            folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.count = 0

    def run(self, folder: Path, *argv: object, stdin: bytes = b"") -> Outcome:
        """Run a command in a folder; fail where the process dies, hangs or uses gigabytes."""
        words = [str(word) for word in argv]
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"argv": words, "stdin": stdin.hex(), "folder": str(folder)}
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        ready = answers(process)
        answer = process.stdout.readline() if ready else b""
        if not answer:
            self.close()
            how = (
                f"died with code {process.returncode}"
                if ready
                else f"took {_SECONDS} s of processor time, or stood still"
            )
            _found(f"the process {how}", words, folder)
        self.count += 1
        outcome = Outcome(words, **json.loads(answer))
        if outcome.peak > _GIGABYTES << 30:
            self.close()
            _found(f"the process took {outcome.peak / 2**30:.1f} GB", words, folder)
        return outcome

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            variables = {"HOME": str(self.home / "home"), "DELTATUNE_CACHE": cache_of(self.home / "cache")}
            variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
            variables |= {"DELTATUNE_THREADS": "1", "WANDB_MODE": "offline", "TMPDIR": str(self.temporary)}
            # PyTorch, where it is installed, makes a folder of its own in /tmp.
            variables |= {"PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": str(self.temporary)}
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | variables,
                cwd=self.home,
                start_new_session=True,
            )
        return self._process

    def must(self, folder: Path, *argv: object, output: Path, stdin: bytes = b"") -> Outcome:
        outcome = self.run(folder, *argv, stdin=stdin)
        # tests/quick_start keeps names of transformers beside pytest's cache.
        check(outcome, folder, output, *self.own, Path(__file__).parents[2] / ".pytest_cache")
        # MLX keeps the code that it compiles for a CPU in a folder of its own.
        left = [path for path in self.temporary.rglob("*") if path.is_file() and "mlx" not in path.parts]
        if left:
            _found(f"temporary files were left: {left}", outcome.argv, folder)
        return outcome


def answers(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a line from a worker; return False once it took _SECONDS of processor time, or stood still for as long.

    Where the system has no /proc, time that passes counts in place of processor time.
    """
    begun = last = processor_seconds(process.pid)
    for _ in range(_WAITS):
        if select.select([process.stdout], [], [], _SECONDS)[0]:
            return True
        now = processor_seconds(process.pid)
        if now is None or begun is None or now - begun > _SECONDS or now == last:
            return False
        last = now
    return False


def processor_seconds(session: int) -> float | None:
    """Return the processor time of a session's processes and of those that they waited for; None without /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, which may hold spaces: state, parent, group, session; from the 11th on, four times.
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def check(outcome: Outcome, folder: Path, output: Path, *own: Path) -> None:
    """Assert that a command that ran in `folder` ended as every command must.

    With exit code 0 or 2, no traceback, one message, and no file written but beside `output` and in `own` folders.
    """
    words, err = outcome.argv, outcome.err
    if outcome.failed:
        _found(f"an exception left the command line:\n{outcome.failed}", words, folder)
    if "Traceback" in outcome.out + err:
        _found(f"a traceback was printed:\n{outcome.out}{err}", words, folder)
    codes = {0, 2} | ({1} if words[0] in _MAY_SAY_NO else set())
    if outcome.code not in codes:
        _found(f"the exit code is {outcome.code}:\n{err}", words, folder)
    messages = [line for line in err.splitlines() if line.startswith("deltatune")]
    if outcome.code == 2 and len(messages) != 1:
        _found(f"exit code 2 with {len(messages)} messages:\n{err}", words, folder)
    if len(err) > 20_000:
        _found(f"a message of {len(err)} characters: {err[:500]}", words, folder)
    elsewhere = [path for path in outcome.written if not _is_allowed(Path(path), output, own)]
    if elsewhere:
        _found(f"files outside the output folder were written: {elsewhere}", words, folder)


def _is_allowed(path: Path, output: Path, own: tuple[Path, ...]) -> bool:
    """Whether a path is in one of the folders or leads to one, or is a folder beside the output, named after it."""
    if path == Path(os.devnull) or any(path.is_relative_to(each) or each.is_relative_to(path) for each in own):
        return True
    if output.is_relative_to(path):
        return True
    # A result is written beside its place and then moved.
    beside = path.relative_to(output.parent).parts[0] if path.is_relative_to(output.parent) else ""
    return beside.startswith((output.name, f".{output.name}."))


def _found(what: str, words: list[str], folder: Path) -> NoReturn:
    text = "\n".join(
        f"--- {path.relative_to(folder)}: {_content(path)}" for path in sorted(folder.rglob("*")) if path.is_file()
    )
    raise AssertionError(f"{what}\ndeltatune {' '.join(words)}\n{text}")


def _content(path: Path) -> Any:
    size = path.stat().st_size
    return path.read_bytes() if size < 500 else f"{size} bytes"
