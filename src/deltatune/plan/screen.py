"""Formats a plan as text for the user."""

from __future__ import annotations

from .checkpoints import Choice
from .device_limits import DeviceLimits
from .forecast import Forecast, Moment
from .search import Largest, RunForecast, fits


def size(count: int) -> str:
    """Bytes as `1.23 GB` or `45.6 MB`."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def line(plan: Forecast, limits: DeviceLimits) -> str:
    """One sentence with the peaks and the limits of the device."""
    most = f" of {size(limits.bytes)} ({limits.why_bytes})" if limits.bytes is not None else ""
    buffers = f" of {limits.buffers:,}" if limits.buffers is not None else ""
    verdict = "it fits" if fits(plan, limits) else "it does not fit"
    return (
        f"Plan: {plan.rows} x {plan.length:,} tokens need {size(plan.bytes.amount)}{most} and "
        f"{plan.buffers.amount:,}{buffers} live buffers at their peaks: {verdict}.{unknown(plan)}"
    )


def unknown(plan: Forecast) -> str:
    """A sentence on the primitives that the plan has no rule for; nothing where it has one for each."""
    if not plan.unknown:
        return ""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in plan.unknown.items())
    return f" The plan has no rule for {kinds} of this version of MLX, and counts one new buffer for each result."


def shape(rows: int, length: int, max_seq_length: int) -> str:
    """Which step is planned; and why, where its rows are shorter than the option allows."""
    line = f"Step: {rows} x {length:,} = {rows * length:,} tokens"
    if length < max_seq_length:
        line += f", since no row of the data is longer, although max_seq_length is {max_seq_length:,}"
    return f"{line}."


def step(found: RunForecast) -> str:
    """What the step of the run needs, and whether it fits."""
    plan, limits = found.forecast, found.limits
    lines = [] if found.checkpoints is None else [found.checkpoints]
    limit = f"limit {size(limits.bytes)}: {limits.why_bytes}" if limits.bytes is not None else limits.why_bytes
    lines.append(f"Peak memory: {size(plan.bytes.amount)} ({limit}), in {plan.bytes.where}.")
    rest = plan.bytes.amount - sum(plan.sizes.values())
    parts = [f"{name} {size(count)}" for name, count in plan.sizes.items()]
    lines.append(f"  {', '.join(parts)}, all else {size(max(rest, 0))}; {_alive(plan.bytes)}")
    limit = f"limit {limits.buffers:,}: {limits.why_buffers}" if limits.buffers is not None else limits.why_buffers
    lines.append(f"Peak live buffers: {plan.buffers.amount:,} ({limit}), in {plan.buffers.where}.")
    parts = [f"{name} {count:,}" for name, count in plan.counts.items()]
    lines.append(f"  {', '.join(parts)}, all else {plan.beyond:,}; {_alive(plan.buffers)}")
    lines.append(("It fits." if fits(plan, limits) else "It does not fit.") + unknown(plan))
    lines.append("Largest that fits, one at a time:")
    return "\n".join(lines)


def tried(choice: Choice) -> str:
    """What the step needs with one choice of checkpoints."""
    operators = " and cheap operators" if choice.checkpoints.operators else ""
    return (
        f"Tried: {choice.again} of {choice.of} layers{operators} computed again, {size(choice.forecast.bytes.amount)}."
    )


def largest(name: str, found: Largest) -> str:
    """The largest batch, length or rank that fits, as a line of its own."""
    words = [f"at least {found.value:,}" if found.probable else f"{found.value:,}"] if found.value else []
    if found.probable:
        words.append(f"by the growth of smaller plans {found.probable:,}")
    if not words:
        return f"  {name}: {'not known, since its plan would take long' if found.more else 'none'}"
    return f"  {name}: {', '.join(words)}{' or more' if found.more else ''}"


def _alive(moment: Moment) -> str:
    shown = ", ".join(f"{each.kind} {size(each.bytes)} in {each.buffers:,}" for each in moment.alive)
    return f"most of it from {shown}." if shown else "nothing else is alive."
