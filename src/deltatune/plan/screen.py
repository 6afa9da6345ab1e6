"""Formats a plan as text for the user."""

from __future__ import annotations

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
        f"{plan.buffers.amount:,}{buffers} live buffers at their peaks: {verdict}."
    )


def text(found: RunForecast) -> str:
    """The whole output of `deltatune plan`."""
    plan, limits = found.forecast, found.limits
    lines = [f"Step: {plan.rows} x {plan.length:,} = {plan.tokens:,} tokens, {plan.primitives:,} primitives."]
    if found.checkpoints is not None:
        lines.append(found.checkpoints)
    limit = f"limit {size(limits.bytes)}: {limits.why_bytes}" if limits.bytes is not None else limits.why_bytes
    lines.append(f"Peak memory: {size(plan.bytes.amount)} ({limit}), in {plan.bytes.where}.")
    rest = plan.bytes.amount - sum(plan.sizes.values())
    parts = [f"{name} {size(count)}" for name, count in plan.sizes.items()]
    lines.append(f"  {', '.join(parts)}, all else {size(max(rest, 0))}; {_alive(plan.bytes)}")
    limit = f"limit {limits.buffers:,}: {limits.why_buffers}" if limits.buffers is not None else limits.why_buffers
    lines.append(f"Peak live buffers: {plan.buffers.amount:,} ({limit}), in {plan.buffers.where}.")
    parts = [f"{name} {count:,}" for name, count in plan.counts.items()]
    lines.append(f"  {', '.join(parts)}, all else {plan.beyond:,}; {_alive(plan.buffers)}")
    largest = [
        f"{name} {_value(each)}"
        for name, each in (("batch", found.batch), ("length", found.length), ("rank", found.rank))
        if each is not None
    ]
    lines.append(f"Largest that fits, one at a time: {', '.join(largest)}.")
    lines.append("It fits." if fits(plan, limits) else "It does not fit.")
    return "\n".join(lines)


def _alive(moment: Moment) -> str:
    shown = ", ".join(f"{each.kind} {size(each.bytes)} in {each.buffers:,}" for each in moment.alive)
    return f"most of it from {shown}." if shown else "nothing else is alive."


def _value(found: Largest) -> str:
    if not found.value:
        return "none"
    return f"{found.value:,}" + (" or more" if found.more else "")
