"""`deltatune eval` prints the loss and perplexity of a model on the test set."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..config import TrainConfig
from .flags import add_adapter, add_options, config_from

_OPTIONS = (
    "model", "data", "batch_size", "test_batches", "max_seq_length", "overlong", "mask_prompt", "chat_turns", "pack",
    "seed", "min_pixels", "max_pixels", "fps", "video_max_frames",
    "trust_remote_code",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser("eval", help="print loss and perplexity on test.jsonl, with or without an adapter")
    add_adapter(parser)
    add_options(parser, _OPTIONS)
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the model that the arguments name and return exit code 0."""
    adapter = arguments.adapter_path
    arguments.adapter_path = None
    evaluate(config_from(arguments), adapter)
    return 0


def evaluate(config: TrainConfig, adapter_path: str | None) -> float:
    """Print and return a model's loss per token on the test set.

    Args:
        config: Options of a run, of which the model, the data and the batches matter here.
        adapter_path: The folder of an adapter to put on the model, or None for the model alone.
    """
    from ..train.evaluate import say_loss
    from ..train.log import Screen
    from ..train.setup import ready

    config = dataclasses.replace(config, train=False, test=True, from_scratch=False)
    run = ready(config, adapter_path=adapter_path)
    screen = Screen(shown=run.world.main)
    for line in [run.splits.rule, *run.splits.notes]:
        screen.say(line)
    return say_loss("Test", run, run.splits.test, screen)
