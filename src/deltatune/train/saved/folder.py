"""Takes the output folder of a run: refuses an unusable one, locks it, and moves an earlier run out of it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ...errors import UserError
from ...machine.file_lock import FileLock, HeldError
from ...options.config import TrainConfig
from ..by_layer.layer_inputs import INPUTS
from ..distributed import World
from . import state

# The files of a run: its weights and states, without which nothing is lost, and its reports.
_ADAPTERS = ("adapters.safetensors", "[0-9]" * 7 + "*_adapters.safetensors", "adapter_config.json")
_WEIGHTS = ("state/*.safetensors", *_ADAPTERS, "best/*.safetensors", "best/adapter_config.json")
_REPORTS = ("metrics.jsonl", "report.html", "tensorboard")
_MODEL = ("config.json", "model*.safetensors")


class RunFolder:
    """The output folder of a run. Inside the `with` block, which may be nested, no other run can take it.

    Rank 0 holds the lock. A folder that cannot take this run, or that another one is using, is a UserError on every
    rank.
    """

    def __init__(self, config: TrainConfig, world: World):
        self.path = Path(config.adapter_path)
        self._config = config
        self._world = world
        self._lock = FileLock(self._lock_path())
        self._entered = 0

    def __enter__(self) -> RunFolder:
        if self._entered == 0:
            self._refuse_unusable()
            self._world.do_on_main(self._take, "use the output folder")
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            self._lock.release()

    def make_room(self) -> list[str]:
        """Move an earlier run to a folder beside this one, or delete it if the options say so; return lines on that.

        Rank 0 calls it. Files that a run needs only while it goes on are removed.
        """
        # A run that was killed could not remove them.
        for inputs in self.path.glob(f"{INPUTS}_*"):
            shutil.rmtree(inputs, ignore_errors=True)
        lines = []
        if not self._lock.supported:
            lines.append(f"Note: the file system of {self.path} has no locks, so a second run in it is not noticed.")
        return [*lines, self._make_room()] if self._used() else lines

    def _make_room(self) -> str:
        before = state.peek(state.state_path(self.path))
        earlier = f"the earlier run in {self.path}"
        if before is not None and not before.finished:
            earlier += f", stopped after iteration {before.iteration:,},"
        try:
            if self._config.overwrite:
                self._delete()
                return f"--overwrite: {earlier} is deleted."
            target = self._move()
        except OSError as error:
            raise UserError(
                f"--adapter-path {self.path}: {earlier} cannot be moved away ({error.strerror}); choose another folder."
            ) from error
        return f"{earlier[0].upper()}{earlier[1:]} is moved to {target}."

    def _lock_path(self) -> Path:
        return state.state_path(self.path).with_name("lock")

    def _refuse_unusable(self) -> None:
        config = self._config
        flag = f"--adapter-path {self.path}"
        if config.model is not None and _same_folder(config.model, self.path):
            raise UserError(
                f"{flag} is the folder of the model, whose files the run would overwrite; choose another folder."
            )
        full = config.fine_tune_type == "full" or config.from_scratch
        if full and self._holds(_MODEL) and not self._holds(_WEIGHTS + _REPORTS):
            raise UserError(f"{flag} holds a model, which the run would overwrite; choose another folder.")

    def _take(self) -> None:
        self._acquire()
        try:
            if self._used() and not self._config.overwrite:
                self._refuse_immovable()
        except UserError:
            self._lock.release()
            raise

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except HeldError as error:
            raise UserError(
                f"--adapter-path {self.path} is in use by another run ({error}); wait until it ends, stop it, or "
                "choose another folder."
            ) from error
        except OSError as error:
            raise UserError(state.refusal(self._lock.path, error)) from error

    def _used(self) -> bool:
        if not self._config.resume:
            return self._holds(_WEIGHTS + _REPORTS)
        return not state.exists(state.state_path(self.path)) and self._holds(_WEIGHTS)

    def _holds(self, patterns: tuple[str, ...]) -> bool:
        return any(True for pattern in patterns for _ in self.path.glob(pattern))

    def _refuse_immovable(self) -> None:
        """Refuse an earlier run that cannot be moved away, because this one needs something in its folder."""
        folder = self.path.resolve()
        config = self._config
        needed = {"the current folder": str(Path.cwd()), "the model": config.model, "the data": config.data}
        inside = {name: Path(path) for name, path in needed.items() if path is not None}
        reasons = [name for name, path in inside.items() if path.exists() and path.resolve().is_relative_to(folder)]
        if os.path.ismount(folder) or not os.access(folder.parent, os.W_OK):
            reasons.append("what may not be renamed")
        if reasons:
            others = "" if config.resume else ", continue that run with --resume, or delete it with --overwrite"
            raise UserError(
                f"--adapter-path {self.path} holds an earlier run, which cannot be moved away, because that folder is "
                f"or contains {reasons[0]}; choose another folder{others}."
            )

    def _move(self) -> Path:
        # A symbolic link stays, and the folder that it names moves.
        folder = self.path.resolve()
        number = 1
        while os.path.lexists(target := folder.with_name(f"{folder.name}-{number}")):
            number += 1
        os.rename(folder, target)
        folder.mkdir(exist_ok=True)
        moved = self._lock
        moved.path = target / moved.path.parent.name / moved.path.name
        self._lock = FileLock(self._lock_path())
        try:
            self._acquire()
        finally:
            moved.release()
        return target if self.path.is_symlink() else self.path.with_name(target.name)

    def _delete(self) -> None:
        for path in [path for pattern in _WEIGHTS + _REPORTS for path in self.path.glob(pattern)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _same_folder(one: str | Path, other: str | Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False
