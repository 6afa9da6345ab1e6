"""`deltatune train` fine-tunes a model."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from ..machine import startup
from ..options.config import TrainConfig
from .flags import add_options, config_from, require

if TYPE_CHECKING:
    from ..train import Result
    from ..train.reports.screen import Screen
    from ..train.saved.outputs import Outputs


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "train",
        help="fine-tune a model, with LoRA by default",
        usage="deltatune train --model MODEL --data DATA [-c FILE] [options]",
        description="Fine-tune a model. The options that mlx_lm.lora has are named as it names them. A YAML file (-c) "
        "can also set lr_schedule, optimizer_config, hf_dataset and all of lora_parameters (see the options page).",
    )
    parser.add_argument(
        "--show-batch",
        action="store_true",
        help="print the first batch, with the tokens that count in the loss marked, and stop",
    )
    parser.add_argument("--verbose", action="store_true", help="name every patch that is applied")
    add_options(parser)
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Train as the arguments say and return exit code 0. The options are checked before the slow imports."""
    config = config_from(arguments)
    require(config, "train", "model", "data")
    if not config.trust_remote_code:
        startup.leave_torch_out()
    train(config, show=arguments.show_batch, verbose=arguments.verbose)
    return 0


def train(config: TrainConfig, *, show: bool = False, verbose: bool = False) -> Result | None:
    """Carry out a whole run: load the model, add adapters, train, save, and test where `config.test` asks for it.

    Args:
        config: The options of the run.
        show: Whether to print the first batch and stop, instead of training.
        verbose: Whether to name every patch that is applied.

    Returns:
        How the run ended, or None where `show` stopped it.
    """
    from ..data.batches.show import show_batch
    from ..plan import placement
    from ..plan.fit import check
    from ..train import Trainer
    from ..train.distributed import World
    from ..train.options_check import check_options
    from ..train.reports.log import check_services
    from ..train.reports.screen import Screen
    from ..train.saved.folder import RunFolder
    from ..train.saving import kept_choices
    from ..train.setup import ready, training_order

    world = World()
    screen = Screen(shown=world.main, verbose=verbose, plain=world.size > 1)
    with contextlib.ExitStack() as stack:
        folder = None
        if not show:
            folder = stack.enter_context(RunFolder(config, world))
            world.do_on_main(lambda: check_services(config.report_to, folder.path), "open the loggers of --report-to")
            stack.enter_context(kept_choices(config))
        for line in check_options(config):
            screen.say(line)
        screen.say(f"Loading {config.model}")
        run = ready(config, world=world, lazy=config.memory is not None)
        config = run.config
        if show:
            for note in run.splits.notes:
                screen.say(note)
            if world.main:
                show_batch(next(training_order(run.splits, config)), run.loaded.tokenizer)
            return None
        for line in run.faults:
            screen.say(line)
        placed = None if config.memory is None else placement.placed(run)
        for line in run.prepare() if placed is None else placed.lines:
            screen.say(line)
        weights = None if placed is None else placed.weights(run, stack)
        trainer = Trainer.of(run, screen, folder, weights)
        checked = check(run, force=config.force) if placed is None else placed.checked()
        for fact in checked.said:
            screen.say(fact)
        result = trainer.run(
            checkpoints=checked.checkpoints, memory_limit=checked.memory_limit, feature_bytes=checked.feature_bytes
        )
        _say_saved(screen, config, result, trainer.outputs)
        return result


def _say_saved(screen: Screen, config: TrainConfig, result: Result, outputs: Outputs) -> None:
    """Say where the results are."""
    best = _best(result, outputs)
    line = f"Saved in {config.adapter_path}; {best}report: {outputs.report}"
    rows = [
        ("saved", f"{config.adapter_path}"),
        ("best", best.removeprefix("best, with ").rstrip("; ")),
        ("report", str(outputs.report)),
    ]
    screen.ended(line, [row for row in rows if row[1]])


def _best(result: Result, outputs: Outputs) -> str:
    """Say where the weights with the lowest validation loss are; an empty string if there was no evaluation."""
    if result.best_iteration is None:
        return ""
    if result.best_iteration == 0:
        return f"the validation loss was lowest before training, {result.best_val_loss:.4f}; "
    return f"best, with validation loss {result.best_val_loss:.4f} at {result.best_iteration}: {outputs.best}; "
