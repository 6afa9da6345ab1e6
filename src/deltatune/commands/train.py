"""`deltatune train` fine-tunes a model."""

from __future__ import annotations

import argparse

from ..machine import startup
from ..options.config import TrainConfig
from .flags import add_options, config_from, require

HELP = "fine-tune a model, with LoRA by default"
USAGE = "deltatune train --model MODEL --data DATA [-c FILE] [options]"
DESCRIPTION = (
    "Fine-tune a model. The options that mlx_lm.lora has are named as it names them. A YAML file (-c) "
    "can also set lr_schedule, optimizer_config, hf_dataset and all of lora_parameters (see the options page)."
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--show-batch",
        action="store_true",
        help="print the first batch, with the tokens that count in the loss marked, and stop",
    )
    parser.add_argument("--verbose", action="store_true", help="name every patch that is applied")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train as the arguments say and return exit code 0. The options are checked before the slow imports."""
    config = config_from(arguments)
    require(config, "train", "model", "data")
    if not config.trust_remote_code:
        startup.leave_torch_out()
    from ..plan.planned_run import finetune

    if arguments.show_batch:
        _show_batch(config)
    else:
        finetune(config, verbose=arguments.verbose)
    return 0


def _show_batch(config: TrainConfig) -> None:
    """Print the first batch, which is made without a weight of the model."""
    from ..data.batches.show import show_batch
    from ..train.distributed import World
    from ..train.options_check import check_options
    from ..train.reports.screen import Screen
    from ..train.setup import ready

    world = World()
    screen = Screen(shown=world.main, plain=world.size > 1)
    for line in [*check_options(config), f"Loading {config.model}"]:
        screen.say(line)
    run = ready(config, world=world, lazy=True)
    for note in [*run.notes, *run.splits.notes]:
        screen.say(note)
    if world.main:
        show_batch(next(run.training_order()), run.loaded.tokenizer)
