"""`deltatune selftest` tries every part of deltatune on this machine and measures its speed."""

from __future__ import annotations

import argparse
from typing import Any

from ..machine import startup


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "selftest",
        help="try everything on this machine (kernels, training, the demo), and write results and times to a file",
        description="Try everything on this machine: run the doctor, compare every kernel with float64 and thirty "
        "training steps with transformers and PEFT, train briefly, run the demo, and time gated_delta beside "
        "upstream's. Each check prints a line; the record is deltatune-selftest.json in the current folder. The exit "
        "code is 0 if no check fails, else 1.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes and leave out the demo; this takes half a minute"
    )
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run every check. The exit code is 1 if one failed."""
    startup.leave_torch_out()
    from ..selftest.run import run_selftest

    return run_selftest(arguments.quick)
