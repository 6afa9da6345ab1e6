"""Shows a plan: its answer first, then the step's memory and the largest values that fit, as each is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..train.reports.columns import three_digits
from ..train.reports.screen import WIDEST, Fact, panel
from .checkpoints import Choice
from .device_limits import DeviceLimits
from .forecast import Forecast, Moment
from .search import Largest, RunForecast, fits


class Shown(Protocol):
    """Shows the findings of a plan, one by one."""

    def shape(self, rows: int, length: int, max_seq_length: int) -> None:
        """Report the shape of the planned step."""

    def fault(self, note: str) -> None:
        """Report a known fault of the model."""

    def tried(self, choice: Choice) -> None:
        """Report the memory of one checkpointing plan."""

    def step(self, run_forecast: RunForecast) -> None:
        """Report the memory of the run's step."""

    def largest(self, name: str, result: Largest) -> None:
        """Take the largest length, batch or rank that fits."""

    def advice(self, sentence: str) -> None:
        """Report the savings of smaller adapters and moments; an empty text where there are none."""


class PlanLines:
    """Says a plan in plain lines, for a pipe or a file.

    Args:
        say: Takes one or more lines.
        verbose: Whether to say where in the model the peak is.
    """

    def __init__(self, say: Callable[[str], object], verbose: bool = False):
        self._say, self._verbose = say, verbose
        self._before: list[str] = []

    def shape(self, rows: int, length: int, max_seq_length: int) -> None:
        self._before.append(f"Step: {_shape(rows, length, max_seq_length)}.")

    def fault(self, note: str) -> None:
        self._before.append(note)

    def tried(self, choice: Choice) -> None:
        self._before.append(tried(choice))

    def step(self, run_forecast: RunForecast) -> None:
        self._say(f"{verdict(run_forecast)}.")
        for line in self._before:
            self._say(line)
        self._say(step(run_forecast, verbose=self._verbose))

    def largest(self, name: str, result: Largest) -> None:
        self._say(f"  {name}: {words(result)}")

    def advice(self, sentence: str) -> None:
        if sentence:
            self._say(sentence)


class PlanPanel:
    """Shows a plan on a terminal: a line with the answer above a panel, both of which change as more is known.

    It is used in a `with` block. A terminal that cannot redraw its lines gets them at the end of it.

    Args:
        console: The terminal.
        verbose: Whether to show where in the model the peak is.
    """

    def __init__(self, console: Console, verbose: bool = False):
        self._console, self._verbose = console, verbose
        self._facts: dict[str, Fact] = {}
        self._planned: RunForecast | None = None
        self._rows: Largest | None = None
        self._live: Live | None = None

    def __enter__(self) -> PlanPanel:
        if not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._whole, vertical_overflow="visible")
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._planned is not None:
            self._console.print(self._whole())

    def shape(self, rows: int, length: int, max_seq_length: int) -> None:
        self._add("step", _shape(rows, length, max_seq_length))

    def fault(self, note: str) -> None:
        self._add("model", note.removeprefix("Note: "))

    def tried(self, choice: Choice) -> None:
        self._add("tried", tried(choice).partition(": ")[2])

    def step(self, run_forecast: RunForecast) -> None:
        plan, limits, self._planned = run_forecast.forecast, run_forecast.limits, run_forecast
        self._facts.pop("tried", None)
        if run_forecast.checkpoints is not None:
            self._add("checkpoints", run_forecast.checkpoints.partition(": ")[2].rstrip("."))
        of = f" of {size(limits.bytes)}" if limits.bytes is not None else ""
        share = plan.bytes.amount / limits.bytes if limits.bytes else None
        text = (
            f"{size(plan.bytes.amount)}{of}, {limits.why_bytes}; the peak is in the {_where(plan.bytes, self._verbose)}"
        )
        self._add("memory", text, share)
        self._add("of it", f"{_parts(plan)}")
        if limits.buffers is not None or self._verbose:
            of = f" of {limits.buffers:,}" if limits.buffers is not None else ""
            share = plan.buffers.amount / limits.buffers if limits.buffers else None
            more = f"; {_counts(plan)}" if self._verbose else ""
            self._add("buffers", f"{plan.buffers.amount:,}{of}, {limits.why_buffers}{more}", share)
        if plan.unknown:
            self._add("note", unknown(plan).strip())
        self._add("largest", "one at a time, what fits:")

    def largest(self, name: str, result: Largest) -> None:
        if name == "length":
            self._rows = result
        self._add(name, words(result))

    def advice(self, sentence: str) -> None:
        if sentence:
            self._add("smaller", sentence)

    def _add(self, name: str, text: str, share: float | None = None) -> None:
        self._facts[name] = Fact(name, text, share=share)
        if self._live is not None:
            self._live.refresh()

    def _whole(self) -> RenderableType:
        if not self._facts:
            return Text("Loading the model's shape and the data", style="dim")
        first = Text("Planning the step", style="dim")
        if self._planned is not None:
            good = fits(self._planned.forecast, self._planned.limits)
            first = Text(verdict(self._planned), style="bold green" if good else "bold red")
            first.append("; looking for the longest row" if self._rows is None else f"; {longest(self._rows)}")
        plain = self._console.options.ascii_only
        width = min(self._console.width, WIDEST)
        return Group(first, panel("deltatune plan", list(self._facts.values()), width, plain))


def size(count: int) -> str:
    """Bytes as `1.23 GB` or `45.6 MB`."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def size_above(count: int) -> str:
    """Bytes as size() gives them, but rounded up, so that an option with this amount is enough."""
    unit = 10**7 if count >= 1e9 else 10**5
    return size(-(-count // unit) * unit)


def verdict(run_forecast: RunForecast) -> str:
    """Return whether the step fits, its memory and the limit, such as `Fits: 12.1 of 80 GB`."""
    plan, limits = run_forecast.forecast, run_forecast.limits
    word = "Fits" if fits(plan, limits) else "Does not fit"
    need, most = plan.bytes.amount, limits.bytes
    if most is None:
        return f"{word}: {size(need)}"
    of = (
        f"{three_digits(need / 1e9)} of {three_digits(most / 1e9)} GB"
        if min(need, most) >= 1e9
        else f"{size(need)} of {size(most)}"
    )
    buffers = limits.buffers is not None and plan.buffers.amount > limits.buffers
    return f"{word}: {of}" + (f"; {plan.buffers.amount:,} of {limits.buffers:,} live buffers" if buffers else "")


def longest(result: Largest) -> str:
    """The longest row that fits, in a few words."""
    return f"longest row {words(result)}" if result.value else "no row fits"


def memory(plan: Forecast, limits: DeviceLimits) -> Fact:
    """Return the step's memory and the device's limit, for the first lines of a run."""
    of = f" of {size(limits.bytes)} ({limits.why_bytes})" if limits.bytes else ""
    text = f"{size(plan.bytes.amount)} planned{of}{_waits(plan, limits)}; {plan.rows} x {plan.length:,} tokens"
    text += f".{unknown(plan)}" if plan.unknown else ""
    share = plan.bytes.amount / limits.bytes if limits.bytes else None
    return Fact("memory", text, line=line(plan, limits), share=share)


def checkpoints(choice: Choice) -> Fact:
    """Return the recomputed layers where `grad_checkpoint` is auto, for the first lines of a run."""
    return Fact("checkpoints", str(choice).partition(": ")[2].rstrip("."), line=str(choice))


def line(plan: Forecast, limits: DeviceLimits) -> str:
    """One sentence with the peaks and the limits of the device."""
    most = f" of {size(limits.bytes)} ({limits.why_bytes})" if limits.bytes is not None else ""
    buffers = f" of {limits.buffers:,}" if limits.buffers is not None else ""
    fit = f"it fits{_waits(plan, limits)}" if fits(plan, limits) else "it does not fit"
    return (
        f"Plan: {plan.rows} x {plan.length:,} tokens need {size(plan.bytes.amount)}{most} and "
        f"{plan.buffers.amount:,}{buffers} live buffers at their peaks: {fit}.{unknown(plan)}"
    )


def _waits(plan: Forecast, limits: DeviceLimits) -> str:
    """Return a note for a step that fits only because MLX waits for queued work; "" for others."""
    waits = limits.brake is not None and plan.bytes.amount >= limits.brake.most and fits(plan, limits)
    return ", with less work queued for the GPU, which may take a quarter longer" if waits else ""


def unknown(plan: Forecast) -> str:
    """A sentence on the primitives that the plan has no rule for; nothing where it has one for each."""
    if not plan.unknown:
        return ""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in plan.unknown.items())
    return f" The plan has no rule for {kinds} of this version of MLX, and counts one new buffer for each result."


def _shape(rows: int, length: int, max_seq_length: int) -> str:
    """Which step is planned; and why, where its rows are shorter than the option allows."""
    text = f"{rows} x {length:,} = {rows * length:,} tokens"
    if length < max_seq_length:
        text += f", since no row of the data is longer, although max_seq_length is {max_seq_length:,}"
    return text


def step(run_forecast: RunForecast, *, verbose: bool = False) -> str:
    """Return the memory of the run's step, with the places of its peaks where `verbose`."""
    plan, limits = run_forecast.forecast, run_forecast.limits
    lines = [] if run_forecast.checkpoints is None else [run_forecast.checkpoints]
    limit = f"limit {size(limits.bytes)}: {limits.why_bytes}" if limits.bytes is not None else limits.why_bytes
    lines.append(f"Peak memory: {size(plan.bytes.amount)} ({limit}), in the {_where(plan.bytes, verbose)}.")
    lines.append(f"  {_parts(plan)}.")
    limit = f"limit {limits.buffers:,}: {limits.why_buffers}" if limits.buffers is not None else limits.why_buffers
    lines.append(f"Peak live buffers: {plan.buffers.amount:,} ({limit}), in the {_where(plan.buffers, verbose)}.")
    lines.append(f"  {_counts(plan)}.")
    if plan.unknown:
        lines.append(unknown(plan).strip())
    lines.append("Largest that fits, one at a time:")
    return "\n".join(lines)


def tried(choice: Choice) -> str:
    """Return the line on the memory of one checkpointing plan."""
    operators = " and cheap operators" if choice.checkpoints.operators else ""
    return f"Tried: {choice.again} of {choice.of} layers{operators} recomputed, {size(choice.forecast.bytes.amount)}."


def words(result: Largest) -> str:
    """The largest batch, length or rank that fits."""
    if not result.value:
        return "none"
    return f"{result.value:,}{' or more' if result.more else ''}"


def _where(moment: Moment, verbose: bool) -> str:
    """Where in the step a peak is: the phase, and where `verbose` the part of the model that it is near."""
    return (moment.where if verbose else moment.where.partition(",")[0]).removeprefix("the ")


def _parts(plan: Forecast) -> str:
    other = plan.bytes.amount - sum(plan.sizes.values())
    return ", ".join(
        [*(f"{name} {size(count)}" for name, count in plan.sizes.items()), f"all else {size(max(other, 0))}"]
    )


def _counts(plan: Forecast) -> str:
    return ", ".join([*(f"{name} {count:,}" for name, count in plan.counts.items()), f"all else {plan.beyond:,}"])
