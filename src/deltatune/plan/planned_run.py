"""Loads a run, makes its plan and trains it: `deltatune train`, and finetune() in Python."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..machine import backend
from ..options.config import TrainConfig
from ..rewards import Rewards
from ..train import Result, Trainer
from ..train.distributed import World
from ..train.iterations import Callbacks
from ..train.options_check import check_options
from ..train.progress import FineTuned
from ..train.reports.log import check_services
from ..train.reports.screen import Screen
from ..train.saved.folder import RunFolder
from ..train.saved.outputs import Outputs
from ..train.saving import kept_choices
from ..train.setup import Run, ready
from .fit import check, examine
from .forward_placement import placed_teacher
from .placement import Placement, placed
from .screen import PlanLines
from .search import RunForecast

# The seconds after which a run says that it is being planned.
_MOMENT = 1.0


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
    placed: Placement | None

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
        places: Placement | None = None
        if bounded:
            with _announced(screen):
                places, lines = placed(run) if run.teacher is None else placed_teacher(run)
        else:
            lines = run.prepare()
        for line in lines:
            screen.say(line)
        return cls(**vars(run), screen=screen, placed=places)

    def trainer(
        self, folder: RunFolder | None = None, rewards: Rewards | None = None, callbacks: Callbacks | None = None
    ) -> Trainer:
        """Plan the run's largest step, and return the trainer of the run.

        Args:
            folder: The folder of the run, if it is taken already.
            rewards: The reward functions of a run that samples its answers.
            callbacks: Functions that the run calls.

        Raises:
            UserError: The run does not fit in memory; the message names changes with which it fits.
        """
        with _announced(self.screen):
            bounds = check(self) if self.placed is None else self.placed.bounds(self)
        for fact in bounds.said:
            self.screen.say(fact)
        return Trainer.of(self, self.screen, folder=folder, bounds=bounds, rewards=rewards, callbacks=callbacks)


def finetune(
    model: TrainConfig | str | PathLike[str],
    data: Any = None,
    *,
    verbose: bool = False,
    on_report: Callable[[dict[str, Any]], object] | None = None,
    on_evaluation: Callable[[dict[str, Any]], object] | None = None,
    on_save: Callable[[Path], object] | None = None,
    **options: Any,
) -> FineTuned:
    """Carry out a whole run as `deltatune train` does: load the model, add adapters, plan, train, save and test.

    A callback may end the run in order by raising StopTraining. Several ranks call it alike.

    Args:
        model: The folder of the model or its name on the Hugging Face hub; or all options of the run, alone.
        data: A list of dicts, a data set of the datasets library, either of these by split ({"train": ..., "valid":
            ...}), or a file, a folder or a name, as for --data.
        verbose: Whether to name every patch that is applied.
        on_report: Is called with the record of each training report.
        on_evaluation: Is called with the record of each evaluation.
        on_save: Is called with the output folder after each save.
        options: The other options by their names, adapters' among them, as flags have them: rank=8, iters=300.

    Returns:
        The trained model with its tokenizer, as load() returns them, and the final figures, which a notebook shows as
        the run's report. Layers that `memory` left on the disk are read when the model is next used, all of them. The
        adapter is in `adapter_path`.

    Raises:
        UserError: For anything in the options, the model or the data that the user can correct.
        StoppedError: After Ctrl-C or SIGTERM, with the state saved.

    Example:
        rows = [{"prompt": "When do you open?", "completion": "At eight."}] * 40
        loaded, result = finetune("path/to/model", rows, rank=8, iters=50)
        print(result.train_loss, generate(loaded, "When do you open?"))
    """
    config = _config_of("finetune", model, data, options)
    world = World()
    with RunFolder(config, world) as folder, kept_choices(config), contextlib.ExitStack() as stack:
        world.do_on_main(lambda: check_services(config.report_to, folder.path), "open the loggers of --report-to")
        # A file of reward functions with a mistake is refused before the model is loaded.
        rewards = stack.enter_context(Rewards(config)) if config.loss == "grpo" else None
        run = PlannedRun.of(config, world=world, verbose=verbose)
        trainer = run.trainer(folder, rewards, Callbacks(on_report, on_evaluation, on_save))
        result = trainer.run()
    best = _best(result, trainer.outputs)
    report = str(trainer.outputs.report)
    rows = [("saved", config.adapter_path), ("best", best.removeprefix("best, with ").rstrip("; ")), ("report", report)]
    line = f"Saved in {config.adapter_path}; {best}report: {report}"
    run.screen.ended(line, [row for row in rows if row[1]], trainer.outputs.commands()[0])
    return FineTuned(run.loaded, result)


def plan_run(model: TrainConfig | str | PathLike[str], data: Any = None, **options: Any) -> RunForecast:
    """Print the plan of a run as `deltatune plan` does, and return it.

    Args:
        model: As finetune() takes it: a model, or all options of the run, alone.
        data: The data, as finetune() takes it.
        options: The other options by their names.

    Returns:
        The forecast of the largest step, the limits of the device, and the largest batch, length and rank that fit.

    Raises:
        UserError: The graphs of this MLX cannot be read, or the run cannot be set up.
    """
    config = _config_of("plan_run", model, data, options)
    return examine(config, shown=PlanLines(partial(print, flush=True)))


def _config_of(caller: str, model: Any, data: Any, options: dict[str, Any]) -> TrainConfig:
    """Return all options of a run, which are either one object or given by their names."""
    if not isinstance(model, TrainConfig):
        return TrainConfig.of(model=model, data=data, **options)
    if data is not None or options:
        raise UserError(f"{caller}: a TrainConfig holds all options; give the others to it.")
    return model


@contextlib.contextmanager
def _announced(screen: Screen) -> Iterator[None]:
    """Say on a terminal that the step is planned, if that takes longer than a moment."""
    tries = (
        "; at the first start Metal compiles each kernel to try it, up to a minute" if backend.compares_times() else ""
    )
    timer = threading.Timer(_MOMENT, screen.say, [f"Planning the step's memory{tries}"])
    timer.daemon = True
    if sys.stdout.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _best(result: Result, outputs: Outputs) -> str:
    """Say where the weights with the lowest validation loss are; an empty string if there was no evaluation."""
    if result.best_iteration is None:
        return ""
    if result.best_iteration == 0:
        return f"the validation loss was lowest before training, {result.best_val_loss:.4f}; "
    return f"best, with validation loss {result.best_val_loss:.4f} at {result.best_iteration}: {outputs.best}; "
