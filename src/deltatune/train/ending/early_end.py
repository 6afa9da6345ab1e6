"""Ends a run early with its state saved: on a signal, on an error, or because another rank has died."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...errors import UserError
from ...options.config import TrainConfig
from ..by_layer.layer_inputs import LostInputsError
from ..by_layer.store import UnreadableWeightsError
from ..distributed import World
from ..reports.screen import Screen
from ..saved import state
from ..saved.outputs import Outputs
from ..saving import Saving
from .interrupt import StoppedError, StopRequest, leave
from .peers import Peers

# Seconds to wait: for the main thread to return from MLX after a second Ctrl-C; for a dead rank to be noticed after an
# error of the backend; and for files that are being written when a rank dies.
_RETURN = 2.0
_NOTICE = 5.0
_WRITE = 600.0


class HurriedError(Exception):
    """Leaves a step by layers after a second signal, or because another rank has died."""


class Ending:
    """Inside its `with` block, signals end the run with its state saved, and dead ranks end it.

    The main thread holds a lock, except while it waits for a batch's gradients (waiting()). There the parameters are
    those of the last update, so that another thread can save them although the main thread may not return from MLX.
    A dead rank costs the iterations since the last save, since the other ranks' sums may never return from MLX.
    """

    def __init__(self, config: TrainConfig, outputs: Outputs, world: World, screen: Screen):
        self._config = config
        self._outputs = outputs
        self._world = world
        self._screen = screen
        # The saving of the run, within rescue() alone.
        self._rescued: Saving | None = None
        self.stop = StopRequest(self._answer, self._save_at_once)
        self._peers = Peers(world, self._rank_ended)
        self._lock = threading.Lock()
        # Set when the main thread has returned from MLX after a second signal.
        self._returned = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> Ending:
        with ExitStack() as stack:
            stack.enter_context(self._peers)
            for rank in self._peers.missing:
                self._screen.say(
                    f"Note: rank {rank} cannot be reached over TCP; if it died, this rank would wait for it."
                )
            stack.enter_context(self.stop)
            self._lock.acquire()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    @property
    def _saving(self) -> Saving:
        assert self._rescued is not None
        return self._rescued

    def in_order(self) -> None:
        """Declare that every rank ends now, with the same error."""
        self._peers.in_order()

    def stopped(self) -> StoppedError:
        """Return the exception for a run that was asked to stop and has saved its state."""
        return StoppedError(
            f"stopped after iteration {self._saving.saved:,} of {self._config.iters:,}; the state is saved in "
            f"{self._outputs.state.parent}. {self._how_to_continue}."
        )

    @property
    def _how_to_continue(self) -> str:
        instead = " in place of --overwrite" if self._config.overwrite else ""
        return f"Run the same command with --resume{instead} to continue"

    def check(self) -> None:
        """Save and stop if a second signal came or a rank has died; parameters must be those of the last update."""
        if self._peers.dead:
            self._wait_for_end()
        if self.stop.hurried:
            self._returned.set()
            self._saving.save_last_update()
            raise self.stopped()

    def asks_to_stop(self) -> bool:
        """Do as check() does; return whether a lone process was asked to stop, so that it may leave its task here."""
        self.check()
        return self.stop.asked and self._world.size == 1

    def between_layers(self) -> None:
        """Leave a step by layers with a HurriedError if a second signal came or a rank has died."""
        if self.stop.hurried or self._peers.dead:
            raise HurriedError

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let another thread save while the main thread, inside the `with` block, waits for MLX."""
        self.check()
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
        self.check()

    @contextmanager
    def rescue(self, saving: Saving) -> Iterator[None]:
        """Save the state of the last update if an exception other than UserError leaves the `with` block.

        A step that between_layers() has left becomes a StoppedError; one that took too long for macOS, or whose files
        are missing, a UserError.
        """
        # Only from here on is the state of the model worth more than the one that was saved.
        self._rescued = saving
        try:
            yield
        except HurriedError:
            self.check()
            self._wait_for_end()
            raise
        except (UnreadableWeightsError, LostInputsError) as error:
            self._saving.save_last_update()
            raise UserError(
                f"{error}. The state after iteration {self._saving.saved:,} is saved in {self._outputs.state.parent}; "
                f"{error.remedy} and give --resume."
            ) from error
        except UserError:
            raise
        except Exception as error:
            if self._world.size > 1:
                # The backend fails if a rank has died.
                self._wait_for_end()
            try:
                self._saving.save_last_update()
            except (UserError, RuntimeError) as second:
                error.add_note(f"The state could not be saved either: {second}")
            else:
                if not self._world.main:
                    raise
                saved = f"The state after iteration {self._saving.saved:,} is saved in {self._outputs.state.parent}."
                too_long = _too_long_for_macos(error, self._config, saved)
                if too_long is not None:
                    raise UserError(too_long) from error
                error.add_note(f"{saved} {self._how_to_continue}.")
            raise
        finally:
            self._rescued = None

    def _wait_for_end(self) -> None:
        self._peers.wait_for_end(_NOTICE)

    def _answer(self, name: str) -> None:
        # If a rank died, the launcher sends SIGTERM to all others, which nobody asked for.
        if not self._peers.dead:
            self._screen.say(
                f"{name}: finishing this step, then saving. A second signal saves the last update at once."
            )

    def _save_at_once(self) -> None:
        """Answer the second signal: save at once if the main thread waits for MLX; otherwise check() will do it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._saving.save_last_update()
        except (UserError, RuntimeError) as error:
            self._screen.say(str(error))
            return
        finally:
            self._lock.release()
        self._screen.stop()
        # A notebook's process must live on: there the run ends when MLX returns.
        if not hasattr(sys, "ps1") and not self._returned.wait(_RETURN):
            leave(str(self.stopped()))

    def _rank_ended(self, dead: list[int]) -> None:
        """Report the dead ranks once, and end this process; runs in the thread of Peers."""
        end = time.monotonic() + _WRITE
        while self._rescued is not None and self._rescued.writing and time.monotonic() < end:
            time.sleep(0.1)
        self._screen.stop()
        lowest = min(set(range(self._world.size)) - set(dead))
        leave(self._message(dead) if self._world.rank == lowest else "")

    def _message(self, dead: list[int]) -> str:
        ended = f"rank {dead[0]}" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))}"
        folder = self._outputs.state.parent
        progress = state.peek(self._outputs.state)
        saved = f"no state was saved yet in {folder}, so the same command starts from the beginning"
        if progress is not None:
            saved = f"the state after iteration {progress.iteration:,} is saved in {folder}"
            saved += f". {self._how_to_continue}"
        return (
            f"{ended} of {self._world.size} ended before the run did: killed, out of memory, or its machine is gone. "
            f"What it printed may say why; {saved}."
        )


# In the messages of Metal's errors, which MLX passes on: a command buffer ran for about five seconds, or a display that
# was in use had to wait for it (macOS 26).
_TIMEOUT = ("kIOGPUCommandBufferCallbackErrorTimeout", "GPU Timeout Error")
_DISPLAY = ("kIOGPUCommandBufferCallbackErrorImpactingInteractivity", "Impacting Interactivity")
# An environment variable of Apple's driver.
_RELAX = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1"


def _too_long_for_macos(error: BaseException, config: TrainConfig, saved: str) -> str | None:
    """Return a message for the user if macOS ended a step that kept the GPU for too long; None for any other error.

    `saved` says where the state is.
    """
    text = str(error)
    if any(words in text for words in _TIMEOUT):
        why = "it kept the GPU for longer than about five seconds"
    elif any(words in text for words in _DISPLAY):
        why = "it kept the display waiting"
    else:
        return None
    half = max(1, config.max_seq_length // 2)
    pieces = "--resume continues it"
    if config.grad_checkpoint is False:
        pieces = "--resume --grad-checkpoint continues it, with long rows in pieces"
    return (
        f"macOS ended a step because {why} ({text.strip()}). {saved} {pieces}; {_RELAX} in the environment lets macOS "
        f"wait longer; --max-seq-length {half} (now {config.max_seq_length}) makes steps shorter, in a new run that "
        "may begin with --resume-adapter-file."
    )
