"""The fuzzer's own machinery: which deltatune it tries, and when a command has hung."""

import sys
from pathlib import Path

import fuzz_commands
import pytest
from fuzz_commands import Commands

from console import started


def test_the_worker_tries_the_deltatune_of_its_python(tmp_path, monkeypatch):
    """A path in front stands for an installed wheel; the source tree beside the tests would hide it."""
    package = tmp_path / "packages" / "deltatune"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text("def main(argv):\n    print(__file__, *argv)\n    return 7\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    commands = Commands(tmp_path / "worker")
    try:
        outcome = commands.run(tmp_path, "train")
    finally:
        commands.close()
    assert (outcome.code, outcome.out) == (7, f"{package / 'cli.py'} train\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processor time is read from /proc")
@pytest.mark.parametrize(
    ("code", "times", "answered"),
    [
        ("while True: pass", None, False),
        ("import time; time.sleep(100)", None, False),
        # A machine that is busy with other work: it is slow, but goes on.
        ("import time; time.sleep(1.2); print()", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], True),
    ],
)
def test_slow_command_counts_as_running(monkeypatch, code, times, answered):
    monkeypatch.setattr(fuzz_commands, "_SECONDS", 0.4)
    if times:
        monkeypatch.setattr(fuzz_commands, "processor_seconds", lambda _: times.pop(0))
    with started([sys.executable, "-S", "-c", code], stderr=None, text=False, start_new_session=True) as process:
        assert fuzz_commands.answers(process) is answered
