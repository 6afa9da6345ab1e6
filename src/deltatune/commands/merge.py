"""`deltatune merge`: fold an adapter into a full checkpoint."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser("merge", help="fold an adapter into a full checkpoint")
    add = parser.add_argument
    add("--model", required=True, metavar="TEXT", help="folder of the base model, or its name on the hub")
    add("--adapter-path", default="adapters", metavar="DIR", help="the adapter (default: adapters)")
    add("--save-path", default="fused_model", metavar="DIR", help="new folder for the result (default: fused_model)")
    add("--dequantize", action="store_true", help="write a quantised base as plain weights")
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Merge as the arguments say."""
    from ..models.merged_checkpoint import merge_checkpoint

    done = merge_checkpoint(arguments.model, arguments.adapter_path, arguments.save_path, arguments.dequantize)
    print(f"Merged into {done.path}: {len(done.changed)} tensors changed, the others as they were.")
    return 0
