"""Searches for the largest batch, length or rank that fits, by planning one value after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .device_limits import DeviceLimits
from .forecast import Forecast

Try = Callable[[int], Forecast]


def fits(plan: Forecast, limits: DeviceLimits) -> bool:
    """Whether the step stays within every limit that the device has."""
    return (limits.bytes is None or plan.bytes.amount <= limits.bytes) and (
        limits.buffers is None or plan.buffers.amount <= limits.buffers
    )


@dataclass(frozen=True)
class Largest:
    """The largest value with a plan that fits, 0 where there is none, and whether more than was searched may fit."""

    value: int
    more: bool


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


def largest(
    attempt: Try,
    limits: DeviceLimits,
    known: dict[int, Forecast],
    values: range,
    fixed: Forecast | None = None,
    *,
    plans: int = 10,
) -> Largest:
    """Search for the largest of some values with a plan that fits.

    Memory grows with the value, so the next one tried is where the parabola through the plans meets the limit, or 99 %
    of it where a step is less than 2 % of the value. The search then ends with a plan of 98 %; and always within 2 % of
    a value that does not fit, or of that place once a plan was foreseen within 1 %, or where a value is bound to fit;
    or where the curve through three plans tells that the next value takes 3 % more than there is.

    `known` are plans that exist already, by value, to which those that `attempt` makes are added, so many at most.
    `fixed` is the memory of any value, as a plan for the value 0 would have it.
    """
    step = values.step
    most = values[-1] if values else 0
    foreseen = False
    if not most or (fixed is not None and not fits(fixed, limits)):
        return Largest(0, more=False)

    for _ in range(plans):
        good, bad = _bounds(known, limits, values, fixed)
        low = good // step * step + step
        high = min(bad - 1, most) // step * step
        points = {float(value): plan for value, plan in known.items()} | ({} if fixed is None else {0.0: fixed})
        wanted = _wanted(points, limits, values, good, bad, high)
        planned = good in known
        full = planned and good >= 50 * step and limits.bytes and known[good].bytes.amount * 50 >= limits.bytes * 49
        near = full or ((foreseen or not planned) and good and wanted < most and (wanted - good) * 50 <= good)
        if low > high or near or (good and bad <= most and (bad - good) * 50 <= bad) or (good == 0 and step in known):
            break
        if good and len(points) > 2 and low > wanted and limits.bytes and 100 * _told(points, low) > 103 * limits.bytes:
            break
        value = min(max(wanted, low), high) if good or fixed is not None else step
        known[value] = attempt(value)
        foreseen = len(points) > 1 and _foreseen(points, value, known[value])
    good = _bounds(known, limits, values, fixed)[0]
    return Largest(good, more=good >= most)


def _wanted(
    points: Mapping[float, Forecast], limits: DeviceLimits, values: range, good: int, bad: int, high: int
) -> int:
    """The value to try next: where the curve through the plans meets the limit, or 99 % of it where steps are small.

    `good` is the largest value that fits, `bad` the smallest that does not, and `high` the largest that may.
    """
    step = values.step
    most = values[-1]
    wanted = _guess(points, limits, good, high)
    if wanted >= 50 * step:
        wanted = _guess(points, replace(limits, bytes=limits.bytes and int(0.99 * limits.bytes)), good, high)
    saved = points[good].saved if good and good in points and len(points) == 2 else 0
    if saved and wanted >= 4 * good and limits.bytes is not None:
        # So far away the line is too steep, since a part does not grow, and one of saved tensors alone too flat.
        flat = good * (1 + (limits.bytes - points[good].bytes.amount) / saved)
        wanted = min(high, int(wanted**0.4 * flat**0.6))
    if bad <= most and wanted >= high:
        # The curve meets the limit beyond a value that does not fit.
        wanted = bad - max(step, bad // 50)
    if bad > most and wanted * 8 >= high * 7:
        # If the largest value of all fits, the search ends.
        wanted = high
    return wanted // step * step


def _bound_to_fit(plans: Mapping[int, Forecast], fixed: int, limits: DeviceLimits) -> int:
    """The largest value that fits, as arithmetic tells from a plan that is at most a seventh away; 0 without one.

    Saved tensors grow in proportion to the value, and the rest that is not `fixed` grows at most so. Buffers do too.
    """
    bound = 0
    for value, plan in plans.items():
        if not plan.saved or limits.bytes is None:
            continue
        over = plan.bytes.amount - limits.bytes
        share = 1 - over / (plan.saved if over > 0 else plan.bytes.amount - fixed)
        if 0.85 <= share <= 1.15 and (limits.buffers is None or plan.buffers.amount * 1.15 <= limits.buffers):
            bound = max(bound, int(share * value))
    return bound


def _bounds(
    plans: Mapping[int, Forecast], limits: DeviceLimits, values: range, fixed: Forecast | None
) -> tuple[int, int]:
    """The largest value that fits by a plan or, where `fixed` is known, by arithmetic; and the smallest that does not.

    A plan tells the latter.
    """
    good = max((value for value, plan in plans.items() if fits(plan, limits)), default=0)
    bad = min((value for value, plan in plans.items() if not fits(plan, limits)), default=values[-1] + 1)
    if fixed is not None:
        bound = min(bad - 1, _bound_to_fit(plans, fixed.bytes.amount, limits))
        good = max(good, bound // values.step * values.step)
    return good, bad


def _guess(plans: Mapping[float, Forecast], limits: DeviceLimits, low: int, high: int) -> int:
    """The value in [low, high] at which the curve through the plans meets the tighter of the two limits."""
    guesses = [high]
    for limit, amount in ((limits.bytes, "bytes"), (limits.buffers, "buffers")):
        if limit is not None:
            points = sorted((value, getattr(plan, amount).amount) for value, plan in plans.items())
            guesses.append(_meets(points, limit, low, high))
    return min(guesses)


def _foreseen(points: Mapping[float, Forecast], value: int, plan: Forecast) -> bool:
    """Whether the curve through other plans told the memory of this one within 1 %."""
    return abs(_told(points, value) - plan.bytes.amount) * 100 <= plan.bytes.amount


def _told(points: Mapping[float, Forecast], value: int) -> float:
    """The bytes of a value by the curve through the three largest plans."""
    return _curve(sorted((at, other.bytes.amount) for at, other in points.items())[-3:], value)


def _meets(points: list[tuple[float, int]], limit: int, low: int, high: int) -> int:
    """The largest value in [low, high] at which the curve through the points nearest to the limit is within it."""
    if len(points) < 2:
        return high
    nearest = sorted(points, key=lambda point: abs(point[1] - limit))[:3]
    if _bends_down(sorted(nearest)):
        nearest = nearest[:2]
    (_, before), (_, after) = sorted(nearest)[-2:]
    if after < before:
        # Another cut into pieces may take less; all in all, memory grows.
        nearest = [min(points), max(points)]
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


def _bends_down(points: list[tuple[float, int]]) -> bool:
    """Whether the parabola through three points falls somewhere behind them, as memory does not."""
    slopes = [(y - x) / (after - before) for (before, x), (after, y) in pairwise(points)]
    return slopes != sorted(slopes)


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


def held(peak: int, layers: Sequence[int], streamed: Sequence[int]) -> int:
    """Return the peak of a step that holds two of the `streamed` layers at a time.

    `peak` is that with all weights in memory, and `layers` has the bytes of each layer's frozen weights.
    """
    sizes = sorted(layers[at] for at in streamed)
    return peak - sum(sizes) + sum(sizes[-2:])


def spread(count: int, resident: int) -> tuple[int, ...]:
    """Return which of `count` layers stay on the disk where `resident` stay in memory, evenly between the others."""
    resident_layers = {(2 * at + 1) * count // (2 * resident) for at in range(resident)}
    return tuple(at for at in range(count) if at not in resident_layers)


def left_on_disk(peak: int, layers: Sequence[int], memory: int, *, least: int = 0) -> tuple[int, ...] | None:
    """Return the fewest layers on the disk, `least` or more, with which a step stays within `memory`; None if none."""
    count = len(layers)
    for resident in range(count - least, -1, -1):
        streamed = spread(count, resident) if resident else tuple(range(count))
        if held(peak, layers, streamed) <= memory:
            return streamed
    return None
