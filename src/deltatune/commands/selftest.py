"""`deltatune selftest` tries every part of deltatune on this machine and measures its speed."""

from __future__ import annotations

import argparse

from ..machine import startup

HELP = "try everything on this machine (kernels, training, the demo), and write results and times to a file"
DESCRIPTION = (
    "Try everything on this machine: run the doctor, compare every kernel with float64 and thirty "
    "training steps with transformers and PEFT, train briefly, run the demo, and time gated_delta beside "
    "upstream's. Each check prints a line; the record is deltatune-selftest.json in the current folder. The exit "
    "code is 0 if no check fails, else 1."
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes and leave out the demo; this takes half a minute"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run every check. The exit code is 1 if one failed."""
    startup.leave_torch_out()
    from ..selftest.run import run_selftest

    return run_selftest(arguments.quick)
