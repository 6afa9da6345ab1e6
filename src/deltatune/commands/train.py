"""`deltatune train`: fine-tune a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig
from .flags import add_options, config_from

if TYPE_CHECKING:
    from ..train import Result


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser(
        "train",
        help="fine-tune a model: LoRA by default",
        usage="deltatune train --model MODEL --data DATA [-c FILE] [options]",
        description="Fine-tune a model. Options are those of mlx_lm.lora wherever it has one; a YAML file (-c) has "
        "lora_parameters, lr_schedule, optimizer_config and hf_dataset besides (docs/reference/options.md).",
    )
    parser.add_argument(
        "--show-batch", action="store_true", help="print the first batch, what counts in the loss marked, and stop"
    )
    parser.add_argument("--force", action="store_true", help="train even where the plan says that it cannot fit")
    add_options(parser)
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Train as the arguments say. What takes seconds to import waits until the options are known to be sound."""
    train(config_from(arguments), show=arguments.show_batch, force=arguments.force)
    return 0


def train(config: TrainConfig, *, show: bool = False, force: bool = False) -> Result | None:
    """A whole run: load, convert, train, save; then the test where asked for.

    Args:
        config: the options of the run.
        show: print the first batch instead.
        force: train even where the plan says that the run cannot fit.
    """
    from ..data.show import show_batch
    from ..plan.fit import check
    from ..train import Trainer
    from ..train.distributed import World
    from ..train.evaluate import say_loss
    from ..train.log import Screen
    from ..train.setup import batch_order, ready

    world = World()
    screen = Screen(shown=world.main)
    screen.say(f"Loading {config.model}")
    run = ready(config, world=world)
    config = run.config
    if show:
        if world.main:
            show_batch(next(batch_order(run.splits.train, config)), run.loaded.tokenizer)
        return None
    for line in run.prepare():
        screen.say(line)
    trainer = Trainer.of(run, screen)
    screen.say(check(run, force=force))
    result = trainer.run()
    if config.test:
        say_loss("Test", run, run.splits.test, screen)
    screen.say(f"Saved in {config.adapter_path}; report: {trainer.outputs.report}")
    return result
