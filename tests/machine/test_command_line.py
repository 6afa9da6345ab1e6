"""Ctrl-C ends the command line without a traceback from its first import on."""

import signal
import sys

import pytest

from console import deltatune
from deltatune.machine import command_line


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["-m", "train"], ["python", "-m", "deltatune", "train"], True),
        (["-m"], ["python", "-Im", "deltatune"], True),
        (["-m"], ["python", "-m", "my.trainer", "deltatune"], False),
        (["/usr/bin/deltatune", "train"], ["python", "/usr/bin/deltatune", "train"], True),
        (["train.py"], ["python", "train.py"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_the_command_line_is_recognised(monkeypatch, argv, original, expected):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert command_line.is_command_line() is expected


# Python runs this file when it starts: it presses Ctrl-C when a module is imported.
PRESSES = """
import os, signal, sys

# A shell's background jobs ignore Ctrl-C, and hand this on.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(name, *_):
        if name == os.environ["PRESSED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.bad_input("Ctrl-C while the command line starts, or reads its files")
@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        ("deltatune.machine.blas", -signal.SIGINT, ""),
        ("deltatune.commands", -signal.SIGINT, ""),
        ("deltatune.plan", 2, "deltatune: interrupted.\n"),
    ],
)
def test_an_interrupt_shows_no_traceback(tmp_path, module, code, said):
    (tmp_path / "sitecustomize.py").write_text(PRESSES)
    done = deltatune("train", "--model", "m", "--data", "d", PYTHONPATH=str(tmp_path), PRESSED_AT=module)
    assert (done.returncode, done.stderr) == (code, said)
