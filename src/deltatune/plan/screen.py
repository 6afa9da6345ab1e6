"""Shows a plan: its answer first, then the step's memory and the largest values that fit, as each is known."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..train.reports.screen import WIDEST, Fact, panel, three_digits
from .checkpoints import Choice
from .device_limits import DeviceLimits
from .forecast import Forecast, Moment
from .search import Largest, RunForecast, fits


class PlanLines:
    """Says a plan in plain lines, for a pipe or a file: its answer first, and earlier facts behind it.

    `say` takes one or more lines. If `verbose`, they say where in the model the peak is.
    """

    def __init__(self, say: Callable[[str], object], verbose: bool = False):
        self.verbose = verbose
        self._say = say
        self._before: list[Fact] = []
        self._answered = False

    def add(self, fact: Fact) -> None:
        """Report a fact."""
        if self._answered:
            self._say(str(fact))
        else:
            self._before.append(fact)

    def answer(self, planned: RunForecast) -> None:
        """Report whether the run fits."""
        self._answered = True
        for line in (f"{verdict(planned)}.", *self._before):
            self._say(str(line))


class PlanPanel:
    """Shows a plan on a terminal: a line with the answer above a panel, both of which change as more is known.

    It is used in a `with` block. A terminal that cannot redraw its lines gets them at the end of it.
    """

    def __init__(self, console: Console, verbose: bool = False):
        self.verbose = verbose
        self._console = console
        self._facts: dict[str, Fact] = {}
        self._planned: RunForecast | None = None
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

    def add(self, fact: Fact) -> None:
        """Report a fact, in the place of an earlier one of its name; one without a text is for lines alone."""
        if fact.text:
            self._facts[fact.name] = fact
        if self._live is not None:
            self._live.refresh()

    def answer(self, planned: RunForecast) -> None:
        """Report whether the run fits."""
        self._planned = planned
        self._facts.pop("tried", None)

    def _whole(self) -> RenderableType:
        if not self._facts:
            return Text("Loading the model's shape and the data", style="dim")
        first = Text("Planning the step", style="dim")
        if self._planned is not None:
            good = fits(self._planned.forecast, self._planned.limits)
            first = Text(verdict(self._planned), style="bold green" if good else "bold red")
            length = self._facts.get("length")
            longest = "looking for the longest row" if length is None else f"longest row {length.text}"
            first.append(f"; {longest}".replace("longest row none", "no row fits"))
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
    need = plan.bytes.amount
    most = limits.bytes
    if most is None:
        return f"{word}: {size(need)}"
    of = (
        f"{three_digits(need / 1e9)} of {three_digits(most / 1e9)} GB"
        if min(need, most) >= 1e9
        else f"{size(need)} of {size(most)}"
    )
    buffers = limits.buffers is not None and plan.buffers.amount > limits.buffers
    return f"{word}: {of}" + (f"; {plan.buffers.amount:,} of {limits.buffers:,} live buffers" if buffers else "")


def memory(plan: Forecast, limits: DeviceLimits) -> Fact:
    """Return the step's memory and the device's limit, for the first lines of a run."""
    of = f" of {size(limits.bytes)} ({limits.why_bytes})" if limits.bytes else ""
    text = f"{size(plan.bytes.amount)} planned{of}{_waits(plan, limits)}; {plan.rows} x {plan.length:,} tokens"
    text += f".{unknown(plan)}" if plan.unknown else ""
    return Fact("memory", text, line=line(plan, limits), share=_share(plan.bytes, limits.bytes))


def checkpoints(choice: Choice) -> Fact:
    """Return the recomputed layers where `grad_checkpoint` is auto."""
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


def shape(rows: int, length: int, max_seq_length: int) -> Fact:
    """Return the shape of the planned step; and why, where its rows are shorter than the option allows."""
    text = f"{rows} x {length:,} = {rows * length:,} tokens"
    if length < max_seq_length:
        text += f", since no row of the data is longer, although max_seq_length is {max_seq_length:,}"
    return Fact("step", text)


def fault(note: str) -> Fact:
    """Return a known fault of the model."""
    return Fact("model", note.removeprefix("Note: "), line=note)


def tried(choice: Choice) -> Fact:
    """Return the memory of one checkpointing plan."""
    operators = " and cheap operators" if choice.checkpoints.operators else ""
    text = f"{choice.again} of {choice.of} layers{operators} recomputed, {size(choice.forecast.bytes.amount)}."
    return Fact("tried", text, line=f"Tried: {text}")


def step(run_forecast: RunForecast, verbose: bool) -> list[Fact]:
    """Return the memory of the run's step, with the places of its peaks where `verbose`."""
    plan, limits = run_forecast.forecast, run_forecast.limits
    other = size(max(plan.bytes.amount - sum(plan.sizes.values()), 0))
    parts = ", ".join([*(f"{name} {size(count)}" for name, count in plan.sizes.items()), f"all else {other}"])
    counts = ", ".join([*(f"{name} {count:,}" for name, count in plan.counts.items()), f"all else {plan.beyond:,}"])
    where = _where(plan.bytes, verbose)
    amount = size(plan.bytes.amount)
    of, limit = _limits(limits.bytes, size)
    facts = [
        Fact(
            "memory",
            f"{amount}{of}, {limits.why_bytes}; the peak is in the {where}",
            f"Peak memory: {amount} ({limit}{limits.why_bytes}), in the {where}.",
            _share(plan.bytes, limits.bytes),
        ),
        Fact("of it", parts, line=f"  {parts}."),
    ]
    of, limit = _limits(limits.buffers, "{:,}".format)
    text = f"{plan.buffers.amount:,}{of}, {limits.why_buffers}{f'; {counts}' if verbose else ''}"
    facts.append(
        Fact(
            "buffers",
            text if of or verbose else "",
            f"Peak live buffers: {plan.buffers.amount:,} ({limit}{limits.why_buffers}), in the "
            f"{_where(plan.buffers, verbose)}.\n  {counts}.",
            _share(plan.buffers, limits.buffers),
        )
    )
    if plan.unknown:
        facts.append(Fact("note", unknown(plan).strip(), line=unknown(plan).strip()))
    return [*facts, Fact("largest", "one at a time, what fits:", line="Largest that fits, one at a time:")]


def largest(name: str, result: Largest) -> Fact:
    """Return the largest length, batch or rank that fits."""
    text = f"{result.value:,}{' or more' if result.more else ''}" if result.value else "none"
    return Fact(name, text, line=f"  {name}: {text}")


def _where(moment: Moment, verbose: bool) -> str:
    """Where in the step a peak is: the phase, and where `verbose` the part of the model that it is near."""
    return (moment.where if verbose else moment.where.partition(",")[0]).removeprefix("the ")


def _limits(limit: int | None, written: Callable[[int], str]) -> tuple[str, str]:
    """Return a limit as a panel and as a line show it; nothing where the device has none."""
    return ("", "") if limit is None else (f" of {written(limit)}", f"limit {written(limit)}: ")


def _share(peak: Moment, limit: int | None) -> float | None:
    return peak.amount / limit if limit else None
