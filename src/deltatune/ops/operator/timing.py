"""Times implementations of one operator beside one another, and tells whether each gives the same bits every time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ...errors import first_line
from .measure import apart

logger = logging.getLogger(__name__)

# Builds the graph of a forward and a backward pass, and returns its results, not computed yet.
Run = Callable[[], list[mx.array]]

#: How often each implementation is timed, after a first run that is not.
ROUNDS = 3
#: An implementation takes the place of one that is preferred to it if it needs less than this part of its time.
GAIN = 0.9
#: The fastest implementation differs with the length: calls of more tokens than each of these are classes of their own.
LENGTHS = (8192, 2048, 0)
#: Tells the time in seconds. Tests replace it.
clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class TrialTime:
    """The shortest time of a forward and a backward pass in seconds, and whether all runs gave the same bits."""

    seconds: float
    same_bits: bool


@apart()
def side_by_side(runs: Mapping[str, Run]) -> dict[str, TrialTime]:
    """Time each implementation, in rounds, so that a busy moment slows all of them; the shortest time counts.

    Only the computation is timed, since a compiled step builds its graph once. One that fails has no time.
    """
    first = {name: results for name, run in runs.items() if (results := _tried(name, partial(_first, run))) is not None}
    seconds, same = dict.fromkeys(first, float("inf")), dict.fromkeys(first, True)
    for _ in range(ROUNDS):
        for name in list(first):
            results = runs[name]()
            start = clock()
            if _tried(name, partial(_computed, results)) is None:
                del first[name]
                continue
            seconds[name] = min(seconds[name], clock() - start)
            same[name] = same[name] and _same_bits(first[name], results)
    times = {name: TrialTime(seconds[name], same[name]) for name in first}
    del first
    # The runs leave buffers of sizes that no step needs.
    mx.clear_cache()
    return times


def length_class(tokens: int) -> int:
    """Return the largest of LENGTHS that a call of so many tokens exceeds."""
    return next(length for length in LENGTHS if tokens > length)


def words(name: str, seconds: float | None, same_bits: bool | None) -> str:
    """Return the time of an implementation in words, such as `fused 3.1 ms`, and whether its bits change."""
    if seconds is None:
        return f"{name} not timed"
    return f"{name} {1e3 * seconds:.1f} ms" + ("" if same_bits else " (its bits change)")


def fastest_first(seconds: Mapping[str, float], preferred: Sequence[str]) -> list[str]:
    """Return the names, the fastest first; of equally fast ones, as GAIN says, a preferred one is first."""
    left, ranked = [name for name in preferred if name in seconds], []
    while left:
        fastest = min(seconds[name] for name in left)
        ranked.append(next(name for name in left if fastest >= GAIN * seconds[name]))
        left.remove(ranked[-1])
    return ranked


def _first(run: Run) -> list[mx.array]:
    return _computed(run())


def _computed(results: list[mx.array]) -> list[mx.array]:
    mx.eval(results)
    return results


def _tried(name: str, call: Callable[[], list[mx.array]]) -> list[mx.array] | None:
    """Return the results of `call`, or None where they cannot be computed here."""
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        logger.info("%s cannot be timed: %s", name, first_line(error)[:300])
        return None


def _same_bits(one: Sequence[mx.array], other: Sequence[mx.array]) -> bool:
    return all(bool(mx.array_equal(_bits(a), _bits(b)).item()) for a, b in zip(one, other, strict=True))


def _bits(array: mx.array) -> mx.array:
    return array.view({2: mx.uint16, 4: mx.uint32}[array.itemsize])
