"""`deltatune demo` trains the bundled model on the bundled data."""

from __future__ import annotations

import argparse
from typing import Any

from ..machine import startup


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "demo", help="train the bundled model on the bundled data and show its accuracy before and after"
    )
    parser.add_argument("kind", nargs="?", choices=["rl"], metavar="rl", help="learn from rewards of its own answers")
    parser.add_argument("--output", metavar="DIR", default="demo-out", help="folder for its files (default: demo-out)")
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    startup.leave_torch_out()
    from ..demo import run_demo, run_rewarded_demo

    return (run_rewarded_demo if arguments.kind else run_demo)(arguments.output)
