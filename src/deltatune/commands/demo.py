"""`deltatune demo`: train on the bundled model and data."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser("demo", help="train on the bundled model and data; shows accuracy before and after")
    parser.add_argument(
        "kind", nargs="?", choices=("text", "vision"), default="text", help="messages (default), or pictures"
    )
    parser.add_argument("--output", metavar="DIR", help="folder for its files (default: demo-out; demo-vision-out)")
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo that the arguments name."""
    if arguments.kind == "vision":
        from ..demo.vision import run_demo as run_vision_demo

        return run_vision_demo(arguments.output or "demo-vision-out")
    from ..demo import run_demo

    return run_demo(arguments.output or "demo-out")
