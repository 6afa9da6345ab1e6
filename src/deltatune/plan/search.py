"""Searches for the largest batch, length or rank that fits, by planning one value after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .device_limits import DeviceLimits
from .forecast import Forecast

_PLANS = 10
Try = Callable[[int], Forecast]


def fits(plan: Forecast, limits: DeviceLimits) -> bool:
    """Whether the step stays within every limit that the device has."""
    return (limits.bytes is None or plan.bytes.amount <= limits.bytes) and (
        limits.buffers is None or plan.buffers.amount <= limits.buffers
    )


@dataclass(frozen=True)
class Largest:
    """Outcome of a search for the largest value that fits.

    Args:
        value: The largest value with a plan that fits, 0 where there is none.
        more: Larger values than are named here, which were not tried, may fit.
        probable: A larger value that there was no time to plan. It fits if memory grows as in the plans made.
    """

    value: int
    more: bool
    probable: int | None = None


@dataclass(frozen=True)
class RunForecast:
    """The forecast of a run, the device's limits, and the largest batch, length and rank that fit.

    A largest value that was not searched for is None. `checkpoints` is the line on the choice of `grad_checkpoint:
    auto`.
    """

    forecast: Forecast
    limits: DeviceLimits
    batch: Largest | None = None
    length: Largest | None = None
    rank: Largest | None = None
    checkpoints: str | None = None


@dataclass(frozen=True)
class Values:
    """The values among which the largest that fits is searched for.

    Attributes:
        step: They are multiples of this.
        most: The largest of them.
        leap: The next one tried is at most this many times the largest that fits so far.
    """

    step: int
    most: int
    leap: int = 4


def largest(
    attempt: Try,
    limits: DeviceLimits,
    known: dict[int, Forecast],
    values: Values,
    *,
    alike: Mapping[float, Forecast] | None = None,
    slower: Callable[[float], float] = lambda times: times,
    deadline: float = math.inf,
) -> Largest:
    """Search for the largest of some values with a plan that fits.

    The search ends within 2 % of a value that does not fit. Memory grows with the value, so the next one tried is where
    the parabola through the plans meets the limit, or a smaller one if that plan would not be made by the deadline.

    Args:
        attempt: Makes the plan for a value.
        limits: The limits to stay within.
        known: Plans that exist already, by value. Those that are made here are added.
        values: The values that may be tried.
        alike: Plans of other steps, by the value that would need as much memory. They only help to choose values.
        slower: How many times as long a plan takes for a value that many times as large.
        deadline: When to stop, in the time of time.monotonic(). If no plan is known, one is made in any case.
    """
    step, most = values.step, values.most
    for _ in range(_PLANS):
        good, bad = _bounds(known, limits, most)
        above = bad - 1 if bad <= most else min(most, values.leap * max(good, step))
        low, high = good // step * step + step, above // step * step
        if low > high or (good and bad <= most and (bad - good) * 50 <= bad) or (good == 0 and step in known):
            break
        points = dict(alike or {}) | {float(value): plan for value, plan in known.items()}
        wanted, known_growth = _guess(points, limits, good, high) // step * step, len(points) > 1
        value = _in_time(known, max(wanted, low) if good else step, step, slower, deadline - time.monotonic())
        # A smaller value than fits already is worth its plan where nothing else tells how memory grows.
        if value is None or (value < good and known_growth):
            if known_growth and wanted > good:
                return Largest(good, more=bad > most and wanted == high, probable=wanted)
            return Largest(good, more=not good or not known_growth)
        known[value] = attempt(value)
    return Largest(_bounds(known, limits, most)[0], more=all(fits(plan, limits) for plan in known.values()))


def _bounds(plans: Mapping[int, Forecast], limits: DeviceLimits, most: int) -> tuple[int, int]:
    """The largest value that fits, and the smallest that does not."""
    good = max((value for value, plan in plans.items() if fits(plan, limits)), default=0)
    return good, min((value for value, plan in plans.items() if not fits(plan, limits)), default=most + 1)


def _in_time(
    plans: Mapping[int, Forecast], wanted: int, step: int, slower: Callable[[float], float], left: float
) -> int | None:
    """Return `wanted`, or its half, quarter and so on, if a new plan for it takes at most `left` seconds; else None."""
    value = wanted
    while value >= step:
        near = min(plans, key=lambda planned: abs(planned - value), default=None)
        if near is None or (value not in plans and plans[near].seconds * slower(value / near) <= left):
            return value
        value = value // 2 // step * step
    return None


def _guess(plans: Mapping[float, Forecast], limits: DeviceLimits, low: int, high: int) -> int:
    """The value in [low, high] at which the curve through the plans meets the tighter of the two limits."""
    guesses = [high]
    for limit, amount in ((limits.bytes, "bytes"), (limits.buffers, "buffers")):
        if limit is not None:
            points = sorted((value, getattr(plan, amount).amount) for value, plan in plans.items())
            guesses.append(_meets(points, limit, low, high))
    return min(guesses)


def _meets(points: list[tuple[float, int]], limit: int, low: int, high: int) -> int:
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


def _curve(points: list[tuple[float, int]], at: int) -> float:
    """The value at `at` of Lagrange's polynomial through the points."""
    total = 0.0
    for index, (x, y) in enumerate(points):
        term = float(y)
        for other, (z, _) in enumerate(points):
            if other != index:
                term *= (at - z) / (x - z)
        total += term
    return total
