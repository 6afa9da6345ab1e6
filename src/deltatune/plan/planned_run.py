"""Loads a run, makes its plan and trains it: `deltatune train`, and finetune() in Python."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..models.load import Loaded
from ..options.config import TrainConfig
from ..rewards import Rewards
from ..train import Result, Trainer
from ..train.distributed import World
from ..train.options_check import check_options
from ..train.reports.log import check_services
from ..train.reports.screen import Screen
from ..train.saved.folder import RunFolder
from ..train.saved.outputs import Outputs
from ..train.saving import kept_choices
from ..train.setup import Run, ready
from .fit import check
from .placement import Placed, placed


@dataclass(frozen=True)
class PlannedRun(Run):
    """A run with its model made trainable, which trains within the memory that it may take.

    Attributes:
        screen: Where the run is printed.
        placed: The places of the weights where `config.memory` bounds the run; None elsewhere.

    Example:
        run = PlannedRun.of(config)
        before = run.model.trainable_parameters()
        result = run.trainer().run()
    """

    screen: Screen
    placed: Placed | None

    @classmethod
    def of(cls, config: TrainConfig, *, world: World | None = None, verbose: bool = False) -> PlannedRun:
        """Load the model and the data that the options name, and make the model trainable.

        Args:
            config: The options of the run.
            world: The ranks that train together; those of the launcher by default.
            verbose: Whether to name every patch that is applied.

        Raises:
            UserError: For anything in the options, the model or the data that the user can correct.
        """
        world = world or World()
        screen = Screen(shown=world.main, verbose=verbose, plain=world.size > 1)
        for line in check_options(config):
            screen.say(line)
        screen.say(f"Loading {config.model}")
        bounded = config.memory is not None
        run = ready(config, world=world, lazy=bounded)
        for line in run.notes:
            screen.say(line)
        places = placed(run) if bounded else None
        for line in run.prepare() if places is None else places.lines:
            screen.say(line)
        return cls(**vars(run), screen=screen, placed=places)

    def trainer(self, folder: RunFolder | None = None, rewards: Rewards | None = None) -> Trainer:
        """Plan the run's largest step, and return the trainer of the run.

        Args:
            folder: The folder of the run, if it is taken already.
            rewards: The reward functions of a run that samples its answers.

        Raises:
            UserError: The run does not fit in memory; the message names changes with which it fits.
        """
        bounds = check(self) if self.placed is None else self.placed.bounds(self)
        for fact in bounds.said:
            self.screen.say(fact)
        return Trainer.of(self, self.screen, folder, bounds, rewards)


def finetune(config: TrainConfig, *, verbose: bool = False) -> tuple[Loaded, Result]:
    """Carry out a whole run as `deltatune train` does: load the model, add adapters, plan, train, save and test.

    Args:
        config: The options of the run.
        verbose: Whether to name every patch that is applied.

    Returns:
        The trained model with its tokenizer, as load() returns them, and the final figures. Layers that `memory` left
        on the disk are read when the model is next used, all of them. The adapter is in `config.adapter_path`.

    Raises:
        UserError: For anything in the options, the model or the data that the user can correct.
        StoppedError: After Ctrl-C or SIGTERM, with the state saved.

    Example:
        loaded, result = finetune(TrainConfig(model="path/to/model", data="path/to/data", memory="12GB"))
        print(result.train_loss, generate(loaded, "When do you open?"))
    """
    world = World()
    with RunFolder(config, world) as folder, kept_choices(config), contextlib.ExitStack() as stack:
        world.do_on_main(lambda: check_services(config.report_to, folder.path), "open the loggers of --report-to")
        # A file of reward functions with a mistake is refused before the model is loaded.
        rewards = stack.enter_context(Rewards(config)) if config.loss == "grpo" else None
        run = PlannedRun.of(config, world=world, verbose=verbose)
        trainer = run.trainer(folder, rewards)
        result = trainer.run()
    best = _best(result, trainer.outputs)
    report = str(trainer.outputs.report)
    rows = [("saved", config.adapter_path), ("best", best.removeprefix("best, with ").rstrip("; ")), ("report", report)]
    line = f"Saved in {config.adapter_path}; {best}report: {report}"
    run.screen.ended(line, [row for row in rows if row[1]], trainer.outputs.commands()[0])
    return run.loaded, result


def _best(result: Result, outputs: Outputs) -> str:
    """Say where the weights with the lowest validation loss are; an empty string if there was no evaluation."""
    if result.best_iteration is None:
        return ""
    if result.best_iteration == 0:
        return f"the validation loss was lowest before training, {result.best_val_loss:.4f}; "
    return f"best, with validation loss {result.best_val_loss:.4f} at {result.best_iteration}: {outputs.best}; "
