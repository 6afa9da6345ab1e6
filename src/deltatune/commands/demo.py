"""`deltatune demo` trains the bundled model on the bundled data."""

from __future__ import annotations

import argparse

from ..machine import startup

HELP = "train the bundled model on the bundled data and show its accuracy before and after"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=["rl"], metavar="rl", help="learn from rewards of its own answers")
    parser.add_argument("--output", metavar="DIR", default="demo-out", help="folder for its files (default: demo-out)")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    startup.leave_torch_out()
    from ..demo import run_demo, run_rewarded_demo

    return (run_rewarded_demo if arguments.kind else run_demo)(arguments.output)
