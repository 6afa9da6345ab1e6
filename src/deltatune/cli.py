"""The command line `deltatune`: it lists the commands, runs one, and turns its outcome into an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .commands import demo, doctor, eval, export, generate, import_, merge, plan, run, selftest, train
from .commands.flags import Parser
from .errors import UserError

COMMANDS = (train, plan, eval, generate, merge, export, import_, run, doctor, selftest, demo)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with every command and its flags."""
    top = Parser(prog="deltatune", description="Fine-tune hybrid gated-delta models with MLX.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after `deltatune`; None takes those of this process.

    Returns:
        The exit code. It is 2, with one message on standard error, for a mistake that the user can correct.
    """
    try:
        arguments = parser().parse_args(argv)
        return arguments.call(arguments)
    except UserError as error:
        sys.stderr.write(f"deltatune: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("deltatune: interrupted.\n")
        return 2
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
