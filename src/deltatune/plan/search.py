"""The largest batch, length and rank that fit, found by planning again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .device_limits import DeviceLimits
from .forecast import Forecast

_PLANS = 10
_SECONDS = 15.0
Try = Callable[[int], Forecast]


def fits(plan: Forecast, limits: DeviceLimits) -> bool:
    """Whether the step stays within both limits, where there are any."""
    return (limits.bytes is None or plan.bytes.amount <= limits.bytes) and (
        limits.buffers is None or plan.buffers.amount <= limits.buffers
    )


@dataclass(frozen=True)
class Largest:
    """The largest value that fits; 0 where not even the least does. more: larger ones may fit, and were not tried."""

    value: int
    more: bool


@dataclass(frozen=True)
class RunForecast:
    """The forecast of a run as asked for, the device's limits, and the largest batch, length and rank that fit (None:
    not sought)."""

    forecast: Forecast
    limits: DeviceLimits
    batch: Largest | None = None
    length: Largest | None = None
    rank: Largest | None = None


def largest(
    attempt: Try, limits: DeviceLimits, known: dict[int, Forecast], *, step: int, most: int, leap: int = 4
) -> Largest:
    """The largest multiple of `step` up to `most` whose plan fits, or one within a fiftieth of what does not.

    attempt: plans for a value. known: plans that there are, by value. leap: how far beyond what fits it looks at once.
    Memory grows with every one of these values, so each next one is where the parabola through the known ones meets the
    limit, kept between what fits and what does not. What is returned has been planned, and fits. It stops looking
    further up after 15 seconds.
    """
    plans, started = dict(known), time.monotonic()
    for _ in range(_PLANS):
        good = max((value for value, plan in plans.items() if fits(plan, limits)), default=0)
        bad = min((value for value, plan in plans.items() if not fits(plan, limits)), default=most + 1)
        low, high = good // step * step + step, min(bad - 1, most, leap * max(good, step)) // step * step
        if low > high or (good and bad <= most and (bad - good) * 50 <= bad):
            break
        if bad > most and time.monotonic() - started > _SECONDS:
            break
        value = min(max(_guess(plans, limits, low, high) // step * step, low), high)
        if good == 0 and step not in plans:
            value = step
        elif good == 0 and not fits(plans[step], limits):
            break
        plans[value] = attempt(value)
    good = max((value for value, plan in plans.items() if fits(plan, limits)), default=0)
    return Largest(good, more=all(fits(plan, limits) for plan in plans.values()))


def _guess(plans: dict[int, Forecast], limits: DeviceLimits, low: int, high: int) -> int:
    """Where the tighter of the two limits is met, by the curve through the plans; within [low, high]."""
    guesses = [high]
    for limit, amount in ((limits.bytes, "bytes"), (limits.buffers, "buffers")):
        if limit is not None:
            points = sorted((value, getattr(plan, amount).amount) for value, plan in plans.items())
            guesses.append(_meets(points, limit, low, high))
    return min(guesses)


def _meets(points: list[tuple[int, int]], limit: int, low: int, high: int) -> int:
    """The largest value in [low, high] at which the curve through the last three points is within the limit."""
    if len(points) < 2:
        return high
    # The three nearest to the limit say most about where it is met.
    nearest = sorted(points, key=lambda point: abs(point[1] - limit))[:3]
    first, last = low, high
    if _curve(nearest, high) <= limit:
        return high
    while first < last:
        middle = (first + last + 1) // 2
        if _curve(nearest, middle) <= limit:
            first = middle
        else:
            last = middle - 1
    return first


def _curve(points: list[tuple[int, int]], at: int) -> float:
    """Lagrange's polynomial through the points."""
    total = 0.0
    for index, (x, y) in enumerate(points):
        term = float(y)
        for other, (z, _) in enumerate(points):
            if other != index:
                term *= (at - z) / (x - z)
        total += term
    return total
