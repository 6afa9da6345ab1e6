"""`deltatune eval`: loss and perplexity on the test set."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..config import TrainConfig
from .flags import add_adapter, add_options, config_from

_OPTIONS = (
    "model", "data", "batch_size", "test_batches", "max_seq_length", "overlong", "mask_prompt", "pack", "seed",
    "min_pixels", "max_pixels", "fps", "video_max_frames",
    "trust_remote_code",
)  # fmt: skip


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser("eval", help="loss and perplexity on test.jsonl, with or without an adapter")
    add_adapter(parser)
    add_options(parser, _OPTIONS)
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate as the arguments say."""
    adapter = arguments.adapter_path
    arguments.adapter_path = None
    evaluate(config_from(arguments), adapter)
    return 0


def evaluate(config: TrainConfig, adapter_path: str | None) -> float:
    """Print and return the loss per token on the test set, of the model with the adapter or without one."""
    from ..train.evaluate import say_loss
    from ..train.log import Screen
    from ..train.setup import ready

    config = dataclasses.replace(config, train=False, test=True, from_scratch=False)
    run = ready(config, adapter_path=adapter_path)
    screen = Screen(shown=run.world.main)
    for line in [run.splits.rule, *run.splits.notes]:
        screen.say(line)
    return say_loss("Test", run, run.splits.test, screen)
