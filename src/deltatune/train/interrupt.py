"""Ctrl-C and SIGTERM: asked for, they are noted; the run stops where its state can be saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ..errors import UserError


class StoppedError(UserError):
    """The user stopped the run; its state is saved, and the message says how to go on."""


class StopRequest:
    """Within it, the first SIGINT or SIGTERM sets `asked`; a second one interrupts at once.

    Only in the main thread, where Python lets signals be handled; elsewhere it changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
