"""The command line `deltatune`: it lists the commands, runs one, and turns its outcome into an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from .commands import (
    chat,
    demo,
    doctor,
    eval,
    export,
    generate,
    import_,
    merge,
    plan,
    recipes,
    run,
    runs,
    selftest,
    train,
)
from .commands.flags import Parser
from .errors import UserError, lacks_memory, reason
from .machine import ranks, startup
from .machine.command_line import raise_at_signals
from .machine.packages import versions
from .machine.wrapping import for_stream
from .ops import IMPLEMENTATIONS
from .options.values import short

COMMANDS = (train, plan, recipes, runs, eval, generate, chat, merge, export, import_, run, doctor, selftest, demo)


def parser(name: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command `name`, or of the whole command line where there is no such command."""
    version = versions().get("deltatune", "(not installed: its files are used where they lie)")
    top = Parser(prog="deltatune", description="Fine-tune hybrid gated-delta models with MLX.")
    top.add_argument("--version", action="version", version=f"deltatune {version}")
    # To this parser, everything behind the command's name is one argument; the command's own parser checks it.
    top.register("type", None, str)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # The flags of all commands take four times as long to make as those of `train`.
    for command in [known for known in COMMANDS if name_of(known) == name] or COMMANDS:
        usage, description = (getattr(command, name, None) for name in ("USAGE", "DESCRIPTION"))
        of_command = commands.add_parser(name_of(command), help=command.HELP, usage=usage, description=description)
        command.add(of_command)
        of_command.set_defaults(call=command.run, parser=of_command)
    return top


def name_of(command: ModuleType) -> str:
    """Return the name by which the command line knows a module of `commands`."""
    return command.__name__.rpartition(".")[2].rstrip("_")


def _refused(error: OSError | RuntimeError) -> int:
    # A note may name files that were saved before the error.
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, RuntimeError):
        ranks.say_error(
            f"deltatune: memory: MLX found no more ({reason(error)}). A smaller --batch-size or --max-seq-length, "
            "--grad-checkpoint, or --memory SIZE, which leaves layers on the disk, take less, as does ending other "
            f"programs that use the device.{notes}"
        )
        return 2
    if isinstance(error, BrokenPipeError):
        # Python would write the rest of the output when it ends, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr.write("deltatune: nobody reads the output any more.\n")
        return 2
    name = f"{short(error.filename)}: " if error.filename else ""
    ranks.say_error(f"deltatune: {name}{error.strerror or reason(error)}.{notes}")
    return 2


def _say_plainly(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as one line for the user; the place in the code belongs to warnings of other packages."""
    if category.__module__.partition(".")[0] == "deltatune":
        return for_stream(f"deltatune: warning: {message}", sys.stderr) + "\n"
    return _formatwarning(message, category, filename, lineno, line)


_formatwarning = warnings.formatwarning


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, the words after `deltatune`, by default those of this process; return the exit code.

    It is 2, with one message on standard error, for a mistake that the user can correct.
    """
    for stream in (sys.stdout, sys.stderr):
        # A path or an answer may have characters that this terminal cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _say_plainly
    if ranks.number() is not None:
        ranks.Warnings().install()
    try:
        raise_at_signals()
        words = (sys.argv[1:] if argv is None else argv) or ["--help"]
        arguments = parser(words[0]).parse_args(words)
        startup.check(IMPLEMENTATIONS)
        return arguments.call(arguments)
    except UserError as error:
        ranks.say_error(f"deltatune: {error}", error.everywhere)
        return 2
    except (OSError, RuntimeError) as error:
        # An error of `run` is that of the program which the command runs.
        if arguments.call is run.run or not (isinstance(error, OSError) or lacks_memory(error)):
            raise
        return _refused(error)
    except KeyboardInterrupt:
        # Every rank of a launched run is interrupted, and the launcher waits for none of them.
        if not ranks.number():
            sys.stderr.write("deltatune: interrupted.\n")
        return 2
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
