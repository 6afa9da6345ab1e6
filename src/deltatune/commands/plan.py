"""`deltatune plan`: what a training step will hold, before it runs."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import add_options, config_from


def add(commands: Any) -> None:
    """The command and its flags."""
    parser = commands.add_parser(
        "plan",
        help="peak memory and live buffers of a training step, and the largest that fits, before anything runs",
        usage="deltatune plan --model MODEL --data DATA [-c FILE] [train's options]",
        description="Plan a run without running a step: options are those of `deltatune train` (docs/how/memory.md). "
        "Exit code 1 where it does not fit.",
    )
    add_options(parser)
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a run; exit code 0 where it fits, 1 where not."""
    config = config_from(arguments)
    from ..plan import screen
    from ..plan.fit import examine
    from ..plan.search import fits

    found = examine(config)
    print(screen.text(found))
    return 0 if fits(found.forecast, found.limits) else 1
