"""Lists the checks of the self-test in their order; quick and decisive ones come first."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from . import (
    attention,
    controls,
    demonstration,
    examined,
    experts,
    gated_delta,
    losses_and_adapters,
    pointwise,
    replays,
    times,
    training,
)
from .outcome import Check
from .times import Timing


def sections(quick: bool, console: Console, timings: list[Timing]) -> Iterator[tuple[str, Iterator[Check]]]:
    """The title of each section and its checks, in order.

    timings: the checks of times append their measurements to this list.
    """
    yield "Doctor", examined.checks(quick)
    yield "Gated delta against float64", gated_delta.checks(quick)
    yield "Attention against float64", attention.checks(quick)
    yield "Experts against float64", experts.checks(quick)
    yield "Passes around the recurrence against float64", pointwise.checks(quick)
    yield "The vocabulary loss and LoRA's products against float64", losses_and_adapters.checks(quick)
    yield "What upstream does alone", controls.checks(quick)
    yield "gated_delta forward and backward: time and memory", times.checks(quick, timings)
    yield "Thirty steps against transformers and PEFT", replays.checks(quick)
    yield "Training", training.checks(quick)
    yield "Demo", demonstration.checks(quick, console)


def names(quick: bool = False) -> list[str]:
    """The names of all checks, none of which is run."""
    console = Console(quiet=True)
    return [check.name for _, checks in sections(quick, console, []) for check in checks]
