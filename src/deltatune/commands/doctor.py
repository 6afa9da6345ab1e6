"""`deltatune doctor` examines this machine: the installed packages, and whether training computes the right numbers."""

from __future__ import annotations

import argparse

from ..machine import startup

HELP = "check versions, device, BLAS, kernels, known faults and patches: is training right on this machine?"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="TEXT", help="a model to examine as well: its layers, and the code that trains each"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole result, with every measured error, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the examination. The exit code is 1 if training would be wrong here or the model cannot be trained."""
    startup.leave_torch_out()
    from ..doctor import screen

    return screen.print_examination(arguments.json, arguments.model)
