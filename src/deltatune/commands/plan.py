"""`deltatune plan` computes how much memory a training step will need, before anything is trained."""

from __future__ import annotations

import argparse
from functools import partial

from ..machine import startup
from ..machine.wrapping import say
from ..options.config import TrainConfig
from .flags import add_options, config_from, require

HELP = "print the peak memory and live buffers of a training step, and the largest step that fits"
USAGE = "deltatune plan --model MODEL --data DATA [-c FILE] [train's options]"
DESCRIPTION = (
    "Plan a run without running a step. The options are those of `deltatune train`. The exit code is 1 "
    "if the run does not fit."
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="say where in the model the peaks are, and what smaller adapters would save",
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a run, its answer first. The exit code is 0 if the run fits, and 1 if not."""
    config = config_from(arguments)
    require(config, "plan", "model", "data")
    if not config.trust_remote_code:
        startup.leave_torch_out()
    from rich.console import Console

    if config.memory is not None:
        return _bounded(config)
    from ..plan.fit import examine
    from ..plan.screen import PlanLines, PlanPanel
    from ..plan.search import fits

    console = Console(highlight=False)
    if console.is_terminal:
        with PlanPanel(console, arguments.verbose) as shown:
            plan = examine(config, shown=shown, advise=arguments.verbose)
    else:
        lines = PlanLines(partial(print, flush=True), arguments.verbose)
        plan = examine(config, shown=lines, advise=arguments.verbose)
    return 0 if fits(plan.forecast, plan.limits) else 1


def _bounded(config: TrainConfig) -> int:
    """Print where the weights of a run with --memory are; the exit code is 1 if the limit is too low."""
    from ..plan import placement
    from ..plan.forward_placement import placed_teacher
    from ..train.setup import ready

    run = ready(config, lazy=True)
    for note in run.notes:
        say(note)
    try:
        placed, _ = placement.placed(run) if run.teacher is None else placed_teacher(run)
    except placement.TooLittleMemoryError as error:
        say(str(error))
        return 1
    for fact in placed.said():
        say(str(fact))
    return 0
