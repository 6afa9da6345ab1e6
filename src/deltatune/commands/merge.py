"""`deltatune merge` merges an adapter into its base model and writes a full checkpoint."""

from __future__ import annotations

import argparse

from ..machine import startup
from ..machine.wrapping import say
from .flags import add_ends, add_model

HELP = "merge an adapter into its base model and write a full checkpoint"


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--adapter-path", default="adapters", metavar="DIR", help="folder of the adapter (default: adapters)")
    add("--save-path", default="fused_model", metavar="DIR", help="new folder for the result (default: fused_model)")
    add("--dequantize", action="store_true", help="write the weights of a quantised base model unquantised")
    add_ends(parser)


def run(arguments: argparse.Namespace) -> int:
    """Merge the adapter that the arguments name and return exit code 0."""
    startup.leave_torch_out()
    from ..models.checkpoint_writer import end_tokens, merge_checkpoint, write_ends

    ends = end_tokens(arguments.model, arguments.extra_eos_token) if arguments.extra_eos_token else []
    done = merge_checkpoint(arguments.model, arguments.adapter_path, arguments.save_path, arguments.dequantize)
    if ends:
        write_ends(done.path, ends)
    say(f"Merged into {done.path}: {len(done.changed):,} tensors changed; all others were copied unchanged.")
    if done.pictures is not None:
        say(done.pictures)
    if done.rounding is not None:
        say(str(done.rounding))
    return 0
