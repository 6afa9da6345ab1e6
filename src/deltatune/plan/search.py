"""Searches for the largest batch, length or rank that fits, by planning one value after another."""

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
    """Whether the step stays within every limit that the device has."""
    return (limits.bytes is None or plan.bytes.amount <= limits.bytes) and (
        limits.buffers is None or plan.buffers.amount <= limits.buffers
    )


@dataclass(frozen=True)
class Largest:
    """The largest `value` that fits, 0 where none does; `more` says that larger ones, which were not tried, may fit."""

    value: int
    more: bool


@dataclass(frozen=True)
class RunForecast:
    """The forecast of a run, the device's limits, and the largest batch, length and rank that fit.

    A largest value that was not searched for is None. `checkpoints` says what was chosen for `grad_checkpoint: auto`.
    """

    forecast: Forecast
    limits: DeviceLimits
    batch: Largest | None = None
    length: Largest | None = None
    rank: Largest | None = None
    checkpoints: str | None = None


def largest(
    attempt: Try, limits: DeviceLimits, known: dict[int, Forecast], *, step: int, most: int, leap: int = 4
) -> Largest:
    """Search for the largest multiple of `step` up to `most` whose plan fits.

    The search ends within 2 % of a value that does not fit, and looks no further up after 15 seconds. Memory grows with
    the value, so the next one tried is where the parabola through the known plans meets the limit.

    Args:
        attempt: makes the plan for a value.
        limits: the limits to stay within.
        known: plans that exist already, by value.
        step: values are multiples of this.
        most: the largest value to try.
        leap: the next value is at most this many times the largest that fits.

    Returns:
        A value whose plan was made and fits.
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
    """The value in [low, high] at which the curve through the plans meets the tighter of the two limits."""
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
    # The three points nearest to the limit predict best where it is met.
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
    """The value at `at` of Lagrange's polynomial through the points."""
    total = 0.0
    for index, (x, y) in enumerate(points):
        term = float(y)
        for other, (z, _) in enumerate(points):
            if other != index:
                term *= (at - z) / (x - z)
        total += term
    return total
