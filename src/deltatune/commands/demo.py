"""`deltatune demo` trains the model that comes with deltatune on the data that comes with it."""

from __future__ import annotations

import argparse
from typing import Any

from ..machine import startup


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "demo", help="train the bundled model on the bundled data and show its accuracy before and after"
    )
    parser.add_argument(
        "kind",
        nargs="?",
        choices=("text", "vision"),
        default="text",
        help="the demo to run: text is about messages (default), vision about pictures",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="folder for its files (default: demo-out, or demo-vision-out for vision)"
    )
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo that the arguments name and return its exit code."""
    startup.leave_torch_out()
    if arguments.kind == "vision":
        from ..demo.vision import run_demo as run_vision_demo

        return run_vision_demo(arguments.output or "demo-vision-out")
    from ..demo import run_demo

    return run_demo(arguments.output or "demo-out")
