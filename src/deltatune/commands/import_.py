"""`deltatune import` turns an adapter of PEFT into one of MLX."""

from __future__ import annotations

import argparse

from ..machine import startup
from ..machine.wrapping import say
from .flags import add_model

HELP = "turn an adapter of PEFT into one of MLX"


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--peft", required=True, metavar="DIR", help="folder that PEFT's save_pretrained wrote")
    add("--save-path", default="adapters", metavar="DIR", help="folder for the adapter (default: adapters)")


def run(arguments: argparse.Namespace) -> int:
    """Import the adapter that the arguments name and return exit code 0."""
    startup.leave_torch_out()
    from ..export.peft_import import import_peft

    adapter = import_peft(arguments.model, arguments.peft, arguments.save_path)
    kind = "DoRA" if adapter.dora else "LoRA"
    count = len(next(iter(adapter.new_rows.values()), ()))
    rows = f" and rows for {count:,} new tokens" if count else ""
    say(f"The adapter is in {arguments.save_path}: {kind} on {len(adapter.factors):,} modules{rows}.")
    return 0
