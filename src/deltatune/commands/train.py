"""`deltatune train`: fine-tune a model."""

from __future__ import annotations

import argparse
import dataclasses
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
        "lora_parameters, lr_schedule, optimizer_config and hf_dataset besides (docs/options.md).",
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
    from ..data import BatchOrder
    from ..data.datasets import first_image, load_datasets
    from ..data.show import show_batch
    from ..models.load import load, locate
    from ..plan.fit import check
    from ..train import Trainer
    from ..train.distributed import World
    from ..train.evaluate import say_loss
    from ..train.log import Screen
    from ..train.setup import eyes, prepare

    world = World()
    screen = Screen(shown=world.main)
    if config.from_scratch:
        config = dataclasses.replace(config, fine_tune_type="full", num_layers=-1)
    screen.say(f"Loading {config.model}")
    # Before the data are looked at for images: a model that is not there is said at once.
    path = locate(config.model)
    image = first_image(config)
    loaded = load(
        path,
        trust_remote_code=config.trust_remote_code,
        from_scratch=config.from_scratch,
        seed=config.seed,
        image=image,
    )
    splits = load_datasets(config, loaded.tokenizer, eyes(loaded))
    if show:
        order = BatchOrder(splits.train, config.batch_size, config.max_seq_length, seed=config.seed, packed=config.pack)
        if world.main:
            show_batch(next(order), loaded.tokenizer)
        return None
    for line in prepare(loaded.model, config):
        screen.say(line)
    trainer = Trainer(
        loaded.model, loaded.tokenizer, config, splits, model_config=loaded.config, world=world, screen=screen
    )
    screen.say(check(loaded.model, config, splits, force=force))
    result = trainer.run()
    if config.test:
        say_loss("Test", loaded.model, config, splits.test, config.test_batches, world, screen)
    screen.say(f"Saved in {config.adapter_path}; report: {trainer.outputs.report}")
    return result
