"""`deltatune doctor`: what runs here, and whether it trains right."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser(
        "doctor", help="versions, device, BLAS, kernels, known faults, patches: is training right here?"
    )
    parser.add_argument("--model", metavar="TEXT", help="a model to look at too: its layers, and what they train with")
    parser.add_argument("--json", action="store_true", help="print all of it, with every error measured, as JSON")
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Examine and print. Exit code 1 if training here would compute wrong numbers or the model cannot be trained."""
    from ..doctor import screen

    return screen.run(arguments.json, arguments.model)
