"""`deltatune run -- CMD`: somebody else's MLX program, in this process, with a fast BLAS and the patches applied."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UserError
from ..machine import backend
from ..machine.compiling import without_kernels
from ..patches import patched, recurrence
from ..patches.patch import PatchReport

USAGE = "Give a console script, a module, or a Python file: deltatune run -- mlx_lm.lora --model ..."


def add(commands: Any) -> None:
    """The command; all that follows it is the other program's."""
    parser = commands.add_parser("run", help="run another MLX trainer with these gradients in it")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the program that the arguments name."""
    return run_program(arguments.command)


def run_program(argv: list[str]) -> int:
    """Run `argv` (a console script, a module, FILE.py, or `python` before FILE.py or -m MODULE) and give its exit code.

    What it raises passes through, its traceback shown without the frames of this function. Raises UserError for a
    command that is not Python.
    """
    program = _program(argv[1:] if argv[:1] == ["--"] else argv)
    argv_before, path_before, hook = sys.argv, list(sys.path), sys.excepthook
    sys.excepthook = _without_our_frames(hook)
    try:
        with _compiled():
            code = _patched(program)
    finally:
        sys.argv, sys.path[:] = argv_before, path_before
    # An exception on its way out still needs our hook: it is shown after this function is left.
    sys.excepthook = hook
    return code


def _patched(program: Callable[[], None]) -> int:
    recurrence.reset()
    with patched(announce=_say) as report:
        _say(report)
        try:
            program()
        except SystemExit as exit_:
            return _code(exit_)
        finally:
            _summary()
    return 0


def _compiled() -> AbstractContextManager[object]:
    """On CUDA, mx.compile without kernels of its own, which are minutes of building in every process there."""
    return without_kernels() if backend.device() == "cuda" else nullcontext()


def _program(command: list[str]) -> Callable[[], None]:
    if command and Path(command[0]).name.startswith("python") and not command[0].endswith(".py"):
        return _interpreter(command[1:])
    if not command:
        raise UserError(f"deltatune run: no command. {USAGE}")
    name, arguments = command[0], command[1:]
    for entry in importlib.metadata.entry_points(group="console_scripts", name=Path(name).name):
        return _script(entry, [shutil.which(name) or name, *arguments])
    path = Path(name) if Path(name).is_file() else Path(shutil.which(name) or "")
    if path.is_file() and (path.suffix == ".py" or _is_python(path)):
        return _file(path, arguments)
    if path.suffix != ".py" and _is_module(name):
        return _module(name, arguments)
    raise UserError(f"deltatune run: {name!r} is no Python file, module or console script of this environment. {USAGE}")


def _interpreter(command: list[str]) -> Callable[[], None]:
    if len(command) > 1 and command[0] == "-m":
        if not _is_module(command[1]):
            raise UserError(f"deltatune run: no module named {command[1]!r}.")
        return _module(command[1], command[2:])
    if not command or command[0].startswith("-"):
        raise UserError(
            f"deltatune run: after python, give FILE.py or -m MODULE, not {' '.join(command[:1]) or 'nothing'}."
        )
    if not Path(command[0]).is_file():
        raise UserError(f"deltatune run: no such file: {command[0]}")
    return _file(Path(command[0]), command[1:])


def _is_module(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    finally:
        sys.path.remove(os.getcwd())


def _is_python(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(256)
    return first.startswith(b"#!") and b"python" in first


def _script(entry: importlib.metadata.EntryPoint, argv: list[str]) -> Callable[[], None]:
    def program() -> None:
        sys.argv = argv
        sys.exit(entry.load()())

    return program


def _file(path: Path, arguments: list[str]) -> Callable[[], None]:
    def program() -> None:
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.resolve().parent))
        runpy.run_path(str(path), run_name="__main__")

    return program


def _module(name: str, arguments: list[str]) -> Callable[[], None]:
    def program() -> None:
        sys.argv = [name, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return program


def _code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    print(exit_.code, file=sys.stderr)
    return 1


def _say(report: PatchReport) -> None:
    if any(each.patch.name == "gated_delta_update" for each in report.applied):
        print(f"deltatune: patched {report}", file=sys.stderr)


def _summary() -> None:
    counts = recurrence.served()
    ours = counts[recurrence.OURS] + counts[recurrence.BACKWARD]
    if ours:
        line = f"{ours} traced calls of gated_delta_update got deltatune's gradients"
        print(f"deltatune: {line}; {counts[recurrence.UPSTREAM]} decoding calls stayed upstream's.", file=sys.stderr)
    else:
        print(
            "deltatune: WARNING: no gated-delta layer was reached. Whatever this program trained, it trained with its "
            "own code: it has no such layer, runs it in another process, or replaced it by itself.",
            file=sys.stderr,
        )


def _without_our_frames(hook: Callable[..., object]) -> Callable[..., object]:
    """An excepthook that starts the traceback where the program starts, as Python would show it."""
    skipped = (__file__, runpy.__file__, "<frozen runpy>")

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        start, frame = None, traceback
        while frame is not None:
            if frame.tb_frame.f_code.co_filename in skipped:
                start = frame.tb_next
            frame = frame.tb_next
        if start is not None:
            error.__traceback__ = start
        hook(kind, error, start or traceback)

    return show
