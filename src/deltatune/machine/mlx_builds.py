"""Lets other processes have MLX compile kernels of its own for an NVIDIA GPU, several at once.

MLX compiles each at its first use, for two to six seconds, one after another, and keeps it in a file for all processes
of the machine. It writes that file in place, so each process here has a folder of its own, from which files then move.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from os import replace
from pathlib import Path

import mlx.core as mx

from . import environment, packages

logger = logging.getLogger(__name__)

#: Compiling a kernel takes up to ten seconds.
SECONDS = 60.0
# MLX's variable, and those by which C++ finds the folder for temporary files.
_VARIABLE, _TEMPORARY = "MLX_PTX_CACHE_DIR", ("TMPDIR", "TMP", "TEMP", "TEMPDIR")


class MlxBuild:
    """A process that computes something for the sake of its kernels, which MLX then finds compiled.

    Where such a process has ended well before, none is started. One that fails leaves MLX to compile them.

    Args:
        module: What `python -m` runs.
        arguments: Its arguments.
    """

    def __init__(self, module: str, *arguments: str):
        self._folder = _folder()
        name = "-".join((module, *arguments, packages.versions().get("deltatune", "")))
        self._mark = self._folder / f"{name}.built"
        self._own: Path | None = None
        if self._mark.exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own = Path(tempfile.mkdtemp(prefix=".deltatune-", dir=self._folder))
        except OSError:
            return  # MLX cannot keep kernels there, either.
        variables = environment.of_child() | {_VARIABLE: str(self._own)}
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )

    def finish(self) -> None:
        """Wait for the process, at most SECONDS, and give MLX what it has compiled."""
        if self._own is None:
            return
        try:
            if self._process.wait(SECONDS) == 0:
                _move(self._own, self._folder)
                self._mark.touch()
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.info("MLX compiles what %s was to compile: %s", self._mark.name, error)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the process, whatever it has done."""
        if self._own is not None:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None


def _folder() -> Path:
    """Return where MLX keeps kernels (ptx_cache_dir in mlx/backend/cuda/jit_module.cpp)."""
    if named := os.environ.get(_VARIABLE):
        return Path(named)
    temporary = next((value for name in _TEMPORARY if (value := os.environ.get(name))), "/tmp")
    return Path(temporary, "mlx", mx.__version__, "ptx")  # type: ignore[attr-defined]


def _move(source: Path, target: Path) -> None:
    # MLX takes a kernel for there once its code is (.ptx), so what it reads beside it goes first.
    files = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.suffix == ".ptx")
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        replace(file, place)
