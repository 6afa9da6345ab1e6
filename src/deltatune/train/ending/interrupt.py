"""Handles Ctrl-C, SIGTERM and SIGHUP: a run answers at once, and stops where its state can be saved."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

from ...errors import UserError

# A terminal that closes sends SIGHUP. Windows does not have it.
_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


class InterruptedSamplingError(Exception):
    """Leaves a sampling because the run was asked to stop; the state before it is whole."""


class StoppedError(UserError):
    """Raised when the user has stopped a run; its state is saved, and the message says how to continue."""


class StopRequest:
    """Inside its `with` block, the first signal asks the run to stop after its step, the second to stop at once.

    The main thread mostly waits for the device inside MLX, where Python handles no signals. So a separate thread is
    woken by each signal and answers it. A third signal raises KeyboardInterrupt as soon as the main thread runs Python
    code. Python can handle signals only in the main thread; in another thread, a StopRequest does nothing.

    The separate thread calls `answer` with the name of the first signal, which sets `asked`, and `hurry` at the second,
    which sets `hurried`.
    """

    def __init__(self, answer: Callable[[str], None], hurry: Callable[[], None]) -> None:
        self.asked = self.hurried = False
        self._answer = answer
        self._hurry = hurry
        self._handled = 0
        self._before: dict[int, object] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ends = socket.socketpair()
        reading, writing = self._ends
        writing.setblocking(False)
        self._woken_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            # nohup makes a process ignore SIGHUP, which must stay ignored. Shells make background processes ignore
            # SIGINT, but whoever sends it to a run wants the run to stop.
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._thread = threading.Thread(target=self._listen, args=(reading,), name="deltatune signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
        signal.set_wakeup_fd(self._woken_before)
        reading, writing = self._ends
        # Closing this end makes the thread leave its loop.
        writing.close()
        self._thread.join()
        reading.close()
        self._ends = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._handled += 1
        # The thread may have counted two signals that Python hands over as one.
        self.asked = True
        self.hurried = self.hurried or self._handled > 1
        if self._handled > 2:
            raise KeyboardInterrupt

    def _listen(self, reading: socket.socket) -> None:
        count = 0
        while arrived := reading.recv(64):
            for number in arrived:
                if number not in self._before:
                    continue
                if number == getattr(signal, "SIGHUP", None):
                    drop_closed_outputs()
                count += 1
                if count == 1:
                    self.asked = True
                    self._answer("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
                elif count == 2:
                    self.hurried = True
                    self._hurry()


def drop_closed_outputs() -> None:
    """Redirect standard output and error to the null device if their reader is gone, so that writing cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        # A stream has no file descriptor if a program has replaced it by an object of its own.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = stream.fileno()
            poll = select.poll()
            poll.register(number, 0)
            if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


def leave(message: str) -> None:
    """End the process with exit code 2 and one message; it works even if the main thread never returns from MLX."""
    drop_closed_outputs()
    for stream, last in ((sys.stdout, ""), (sys.stderr, message and f"deltatune: {message}\n")):
        # A full disk, where the output is a file, must not keep the process.
        with contextlib.suppress(OSError, ValueError):
            stream.write(last)
            stream.flush()
    os._exit(2)
