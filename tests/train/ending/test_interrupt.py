"""Tests signals: the first is answered at once, the second saves during the step, and SIGHUP acts as SIGTERM does."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from console import started
from deltatune.train.ending.interrupt import StopRequest
from deltatune.train.saved import state
from killed_runs import adapters

# In one iteration MLX computes as long as a large model would, during which Python runs no signal handler.
SLOW = """
import sys
from contextlib import contextmanager
import deltatune
import mlx.core as mx
from deltatune.cli import main
from deltatune.train.ending.early_end import Ending

slow, products = int(sys.argv[1]), int(sys.argv[2])
plain = Ending.waiting

@contextmanager
def waiting(self):
    with plain(self):
        if self._saving.training.progress.iteration + 1 == slow:
            x = mx.ones((1000, 1000))
            for _ in range(products):
                x = (x @ x) * 1e-3
            print("waiting", flush=True)
            mx.eval(x)
            print("waited", flush=True)
        yield

Ending.waiting = waiting
sys.exit(main(["train", "-c", *sys.argv[3:]]))
"""


@pytest.fixture(autouse=True)
def in_the_foreground():
    """A program under nohup ignores SIGHUP, and so do those that it starts, such as these tests and their runs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def slow_run(options, tmp_path):
    """slow_run(iteration, products, **how) starts a run in `out` that waits in that iteration; `how` goes to Popen."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(options | {"adapter_path": str(tmp_path / "out"), "val_batches": 0}))
    with contextlib.ExitStack() as programs:
        yield lambda iteration, products, **how: programs.enter_context(
            started([sys.executable, "-c", SLOW, iteration, products, file], **how)
        )


def until(stream, text):
    """Read the lines up to the first one with `text`."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} did not come: {lines}")


@pytest.mark.parametrize("iteration", [5, pytest.param(6, marks=pytest.mark.weekly)])
def test_a_second_signal_saves_the_last_update_and_ends_during_the_step(
    slow_run, make_trainer, tmp_path, iteration, straight_run
):
    """The first is answered while MLX waits. Iterations 5 and 6 are one update, before which the state is saved."""
    process = slow_run(iteration, 2000)
    until(process.stdout, "waiting")
    process.send_signal(signal.SIGINT)
    until(process.stdout, "Ctrl-C: finishing this step, then saving.")
    process.send_signal(signal.SIGINT)
    rest, complaint = process.communicate(timeout=60)
    assert "waited" not in rest
    assert process.returncode == 2
    assert "stopped after iteration 4 of 8; the state is saved in" in complaint
    make_trainer(val_batches=0, resume=True).run()
    assert adapters(tmp_path / "out") == adapters(straight_run(val_batches=0))


def test_a_closed_terminal_ends_the_run_with_its_state(slow_run, tmp_path):
    """Printing fails once the terminal is closed, and the state must be saved all the same."""
    ours, theirs = pty.openpty()
    process = slow_run(3, 25, stdin=theirs, stdout=theirs, stderr=theirs, text=False, start_new_session=True,
                       preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)))  # fmt: skip
    os.close(theirs)
    said = b""
    while b"waiting" not in said:
        said += os.read(ours, 1024)
    os.close(ours)
    assert process.wait(timeout=60) == 2
    assert state.peek(state.state_path(tmp_path / "out")).iteration == 3


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.05)


def test_calls_and_what_was_before():
    calls, hurried = [], threading.Event()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with StopRequest(calls.append, hurried.set) as stop:
        assert not stop.asked
        send(signal.SIGHUP)
        assert stop.asked
        assert not stop.hurried
        send(signal.SIGTERM)
        assert stop.hurried
        assert hurried.wait(5)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert calls == ["SIGHUP"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_under_nohup_a_closed_terminal_stops_nothing():
    calls = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest(calls.append, print) as stop:
        send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert (calls, stop.asked) == ([], False)


def test_another_thread_than_the_main_one_handles_no_signals():
    handlers = []

    def inside():
        with StopRequest(print, print):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_second_signal_is_not_forgotten_where_python_handles_two_at_once():
    """While MLX computes, two signals of one number are two to the thread that is woken, and one to the handler."""
    hurried = threading.Event()
    with StopRequest(lambda name: None, hurried.set) as stop:
        stop._ends[1].send(bytes([signal.SIGINT, signal.SIGINT]))
        assert hurried.wait(5)
        send(signal.SIGINT)
        assert stop.hurried


def test_a_full_disk_keeps_no_process_from_leaving(full_disk):
    program = f"import sys; sys.stdout = open('{full_disk}', 'w'); print('said before');"
    program += "from deltatune.train.ending.interrupt import leave; leave('rank 1 ended')"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "deltatune: rank 1 ended\n")
