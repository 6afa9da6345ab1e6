"""Two ranks under mlx.launch print a shared message once, and one of a single rank with its number."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from console import SCRIPT

# Becomes the console script.
CONSOLE = f"import os, sys; os.execv({str(SCRIPT)!r}, [{str(SCRIPT)!r}, *sys.argv[1:]])"
# Two ranks warn and end alike, one a little later; rank 1 also warns by itself.
WARNING = """
import logging, os, sys, time, warnings
from deltatune.machine import ranks
ranks.WAIT = 3.0
ranks.Warnings().install()
time.sleep(0.5 * (ranks.number() == 0))
warnings.warn("of all ranks")
logging.getLogger("deltatune.ops").warning("a kernel of all ranks")
if ranks.number() == 1:
    warnings.warn("of one rank alone")
ranks.say_error("deltatune: every rank ends.", None)
if ranks.number() == 0:
    time.sleep(1)
"""
ALONE = """
from deltatune.machine import ranks
ranks.WAIT = 0.3
if ranks.number() == 1:
    ranks.say_error("deltatune: only here.", KNOWN)
"""


@pytest.fixture
def launched(tmp_path):
    """launched(program, *words) runs a program as two ranks of mlx.launch, and returns the process that ended."""

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        if sys.platform == "win32" or shutil.which("bash") is None:
            pytest.skip("mlx.launch needs bash")
        file = tmp_path / "program.py"
        file.write_text(program)
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = str(one.getsockname()[1])
        launcher = str(Path(sys.executable).with_name("mlx.launch"))
        silent, never_written = os.pipe()
        try:
            return subprocess.run(
                [launcher, "-n", "2", "--starting-port", port, "--python", sys.executable, str(file), *words],
                stdin=silent,
                capture_output=True,
                text=True,
                timeout=240,
                cwd=tmp_path,
                env=os.environ | {"DELTATUNE_CACHE": str(tmp_path / "cache")},
            )
        finally:
            os.close(silent)
            os.close(never_written)

    return run


def test_two_ranks_say_a_mistake_once(launched):
    done = launched(CONSOLE, "train", "-c", "nowhere.yaml")
    assert done.stderr.count("deltatune: config nowhere.yaml: cannot be read") == 1, done.stderr
    assert "rank 1: " not in done.stderr
    assert "exited with code 2" in done.stdout + done.stderr


def test_warnings_of_all_ranks_come_once_and_those_of_one_with_its_number(launched):
    done = launched(WARNING)
    for text in ("UserWarning: of all ranks", "a kernel of all ranks", "deltatune: every rank ends."):
        assert done.stderr.count(text) == 1, done.stderr
    assert done.stderr.count("of one rank alone") >= 1
    (line,) = [line for line in done.stderr.splitlines() if "UserWarning: of one rank alone" in line]
    assert line.startswith("rank 1: ")


@pytest.mark.parametrize("known", [None, pytest.param(False, marks=pytest.mark.weekly)])
def test_error_of_one_rank_has_its_number(launched, known):
    done = launched(ALONE.replace("KNOWN", repr(known)))
    assert done.stderr.count("rank 1: deltatune: only here.") == 1, done.stderr


def test_a_process_of_its_own_says_everything(monkeypatch, capsys, tmp_path):
    from deltatune.machine import ranks

    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    for name in ("MLX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks.say_error("deltatune: a mistake.", None)
    assert capsys.readouterr().err == "deltatune: a mistake.\n"
    assert not list(tmp_path.iterdir())
    # What a launcher with the same number said long ago is not heard.
    monkeypatch.setenv("MLX_RANK", "0")
    ranks.note("error", "deltatune: of old.")
    (file,) = tmp_path.glob("ranks/*.json")
    assert json.loads(file.read_text()) == [["error", "deltatune: of old."]]
    os.utime(file, (0, 0))
    assert ranks.said() == []
