"""Runs commands of deltatune on the stand-in for a Mac (stand_in.py), all in one process."""

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from console import started

STAND_IN = Path(__file__).with_name("stand_in.py")


def ran(
    commands: Sequence[Sequence[object]],
    folder: Path,
    *flags: str,
    cwd: Path,
    env: dict[str, str],
    interrupts: Sequence[str] = (),
    timeout: float | None = 900,
) -> list[dict]:
    """Return what each command did: code, wired, kernels; and `said`, its output.

    `folder` keeps compiled kernels. The process gets a Ctrl-C when it has printed the first text of `interrupts`, then
    another at the next one.
    """
    words = json.dumps([[str(word) for word in command] for command in commands])
    program, waiting = [sys.executable, "-P", STAND_IN, *flags, folder], list(interrupts)
    said: list[str] = []
    results: list[dict] = []
    with tempfile.TemporaryFile("w+") as errors, started(program, stdin=-1, stderr=errors, cwd=cwd, env=env) as process:
        end = threading.Timer(timeout or threading.TIMEOUT_MAX, process.kill)
        end.daemon = True
        end.start()
        process.stdin.write(words)
        process.stdin.close()
        for line in process.stdout:
            if waiting and waiting[0] in line:
                process.send_signal(signal.SIGINT)
                waiting.pop(0)
            if line.startswith('{"code": '):
                results.append(json.loads(line) | {"said": "".join(said).rstrip("\n")})
                said = []
            else:
                said.append(line)
        code = process.wait()
        end.cancel()
        errors.seek(0)
        complaint = errors.read()
    assert code == 0, complaint[-3000:]
    # A kernel that its trial refuses would hide here: training goes on without it.
    assert "is not used on this machine" not in complaint, complaint[-3000:]
    assert len(results) == len(commands), "".join(said)[-2000:] + complaint[-2000:]
    assert not waiting, "".join(result["said"] for result in results)
    return results
