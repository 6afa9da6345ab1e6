"""`deltatune run -- CMD` runs another MLX program in this process, with a fast BLAS and deltatune's patches applied."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import UserError
from ..machine.wrapping import say

if TYPE_CHECKING:
    from ..patches import PatchReport

_GIVE = "Give a console script, a module, or a Python file: deltatune run -- mlx_lm.lora --model ..."


HELP = "run another MLX trainer with deltatune's gradients in it"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true", help="name every patch that is applied; stands before the other program"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="run it although upstream has changed and deltatune's gradients cannot serve it; stands there, too",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, type=str, metavar="-- COMMAND ...")


def run(arguments: argparse.Namespace) -> int:
    """Run the program that the arguments name and return its exit code."""
    return run_program(arguments.command, verbose=arguments.verbose, force=arguments.force)


def run_program(argv: list[str], *, verbose: bool = False, force: bool = False) -> int:
    """Run a Python program with the patches applied and return its exit code.

    `argv` is a console script, a module or FILE.py, or `python` before FILE.py or -m MODULE, and its arguments. A
    UserError refuses a command that is no Python program and, unless `force`, one in which results depend on a function
    that deltatune cannot replace. An exception of the program passes through; Python then shows its traceback without
    deltatune's own frames.
    """
    from ..machine import backend
    from ..machine.compiling import without_kernels

    program = _program(argv[1:] if argv[:1] == ["--"] else argv)
    argv_before = sys.argv
    path_before = list(sys.path)
    hook = sys.excepthook
    sys.excepthook = _without_our_frames(hook)
    try:
        # On CUDA, mx.compile would build kernels of its own, which takes minutes in every process.
        with without_kernels() if backend.builds_kernels() else nullcontext():
            code = _patched(program, verbose, force)
    finally:
        sys.argv = argv_before
        sys.path[:] = path_before
    # After an exception the hook stays: Python shows the traceback when this function has already been left.
    sys.excepthook = hook
    return code


def _patched(program: Callable[[], None], verbose: bool, force: bool) -> int:
    """Run a program with the patches applied, report how often they served it, and return its exit code."""
    from ..patches import TRAINING, patched, refuse, whole_rows

    left_alone: list[str] = []

    def report(patches: PatchReport) -> None:
        if not force:
            refuse(patches, None, (TRAINING,))
        left_alone.extend(left.patch.target for left in patches.left_alone if TRAINING in left.patch.needed_for)
        _report_patches(patches, verbose)

    whole_rows.reset()
    code: int | None = None
    with patched(announce=report) as applied:
        report(applied)
        try:
            program()
            code = 0
        except SystemExit as exit_:
            code = _exit_code(exit_)
        except UserError:
            code = 2  # The message names the refusal; it is no crash.
            raise
        finally:
            # A program that prints its help has trained nothing.
            if code != 2 and {"-h", "--help"}.isdisjoint(sys.argv):
                _report_calls(left_alone, crashed=code != 0)
    return code


def _program(command: list[str]) -> Callable[[], None]:
    if command and Path(command[0]).name.startswith("python") and not command[0].endswith(".py"):
        return _interpreter(command[1:])
    if not command:
        raise UserError(f"deltatune run: no command was given. {_GIVE}")
    name = command[0]
    arguments = command[1:]
    for entry in importlib.metadata.entry_points(group="console_scripts", name=Path(name).name):
        return partial(_script, entry, [shutil.which(name) or name, *arguments])
    path = Path(name) if Path(name).is_file() else Path(shutil.which(name) or "")
    if path.is_file() and (path.suffix == ".py" or _is_python(path)):
        return partial(_file, path, arguments)
    if path.suffix != ".py" and _is_module(name):
        return partial(_module, name, arguments)
    raise UserError(f"deltatune run: {name!r} is no Python file, module or console script of this environment. {_GIVE}")


def _interpreter(command: list[str]) -> Callable[[], None]:
    if len(command) > 1 and command[0] == "-m":
        if not _is_module(command[1]):
            raise UserError(f"deltatune run: no module named {command[1]!r}; give one of this environment or folder.")
        return partial(_module, command[1], command[2:])
    if not command or command[0].startswith("-"):
        raise UserError(
            f"deltatune run: after python, give FILE.py or -m MODULE, not {' '.join(command[:1]) or 'nothing'}."
        )
    if not Path(command[0]).is_file():
        raise UserError(f"deltatune run: no such file: {command[0]}; give the path of a Python file.")
    return partial(_file, Path(command[0]), command[1:])


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


def _script(entry: importlib.metadata.EntryPoint, argv: list[str]) -> None:
    sys.argv = argv
    sys.exit(entry.load()())


def _file(path: Path, arguments: list[str]) -> None:
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def _module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _exit_code(exit_: SystemExit) -> int:
    """Return the exit code of a SystemExit and print its message, as Python itself would."""
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    print(exit_.code, file=sys.stderr)
    return 1


def _report_patches(report: PatchReport, verbose: bool) -> None:
    reaches = {"gated_delta_update", "ssm_update", "recurrent_gla"} & {one.patch.name for one in report.applied}
    if reaches or (verbose and report.applied):
        say(f"deltatune: patched {report if verbose else report.summary()}", sys.stderr)


def _report_calls(left_alone: list[str], *, crashed: bool) -> None:
    """Print how many calls of the program got deltatune's gradients, or why none did: functions were left alone."""
    from ..patches import recurrence, whole_rows

    counts = recurrence.served()
    attended = whole_rows.served()[whole_rows.OURS]
    ours = counts[recurrence.OURS] + counts[recurrence.BACKWARD]
    if ours:
        line = f"{ours:,} traced calls of recurrences{f' and {attended:,} of attention' if attended else ''}"
        decoding = f"{counts[recurrence.UPSTREAM]:,} decoding calls stayed upstream's."
        say(f"deltatune: {line} got deltatune's gradients; {decoding}", sys.stderr)
    elif left_alone:
        say(
            f"deltatune: WARNING: {', '.join(left_alone)} kept upstream's code, so nothing that this program trained "
            "has deltatune's gradients.",
            sys.stderr,
        )
    elif attended:
        say(
            f"deltatune: {attended:,} traced calls of attention got deltatune's gradients; the program has no "
            "recurrent layer, runs it in another process, or replaces it itself.",
            sys.stderr,
        )
    elif crashed:
        say("deltatune: the program ended with an error before it reached a recurrent layer.", sys.stderr)
    else:
        say(
            "deltatune: WARNING: no recurrent layer was reached. Whatever this program trained, it trained with its "
            "own code: the program has no such layer, runs it in another process, or replaces it itself.",
            sys.stderr,
        )


def _without_our_frames(hook: Callable[..., object]) -> Callable[..., object]:
    """Return an excepthook with tracebacks that start where the program starts, as if Python had run it directly."""
    skipped = (__file__, runpy.__file__, "<frozen runpy>")

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        start = None
        frame = traceback
        while frame is not None:
            if frame.tb_frame.f_code.co_filename in skipped:
                start = frame.tb_next
            frame = frame.tb_next
        if start is not None:
            error.__traceback__ = start
        hook(kind, error, start or traceback)

    return show
