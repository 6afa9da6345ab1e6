"""`deltatune selftest`: does everything work on this machine, and how fast?"""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser(
        "selftest",
        help="try everything on this machine: kernels, training, the demo; times; one file to send along",
        description="Try everything on this machine: the doctor, every kernel against float64, thirty training steps "
        "against transformers and PEFT, short trainings, the demo; and measure gated_delta beside upstream's. A line a "
        "check; deltatune-selftest.json in the current folder. Exit code 0 if no check fails, else 1.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and no demo: half a minute")
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Try everything. Exit code 1 if a check failed."""
    from ..selftest.run import run_selftest

    return run_selftest(arguments.quick)
