"""The dispatch of calls: how implementations are chosen and their kernels built, and notes on who served which call.

It is no part of the trace (trace.py), which is for layers: a run, a trial, the doctor or a test sets it around calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .context import Context


@dataclass(frozen=True)
class NotedCall:
    """A call of a patched function of "gated delta", "attention" or "experts", with the ids of its callers' `self`.

    `implementation` names the one that serves it in training; it is "" where upstream's code does.
    """

    operator: str
    callers: list[int]
    implementation: str


@dataclass(frozen=True)
class Dispatch:
    """The settings with which implementations are chosen, and the notes on their calls.

    Attributes:
        trials: Whether an implementation may serve that has to be tried on this machine before.
        rankings: Which implementation of an operator serves which class of calls in a run, by operator/rankings.py;
            None outside a run.
        builders: The threads that build kernels, which are then not launched; None where kernels are launched.
        foreseen: The trials of kernels that are being built for foreseen calls (ops/operator/foresight.py); None where
            calls are made.
        device: Runs the launches of kernels (ops/kernels/launch.py); None for MLX's default device.
        small_case: Where cheap operators note that they serve, whatever the size of their arrays; None outside the
            small cases of patches.
        callers: The calls of patched functions so far (patches/whole_rows.py); None if nobody asks.
        recurrences: Calls of the recurrence, counted by implementation.
        attentions: Calls of attention, counted by implementation.
    """

    trials: bool = True
    rankings: object | None = None
    builders: Executor | None = None
    foreseen: set[Hashable] | None = None
    device: Callable[[Any], list[mx.array]] | None = None
    small_case: list[str] | None = None
    callers: list[NotedCall] | None = None
    recurrences: Counter[str] = field(default_factory=Counter)
    attentions: Counter[str] = field(default_factory=Counter)


_context = Context(Dispatch())
current = _context.current
having = _context.having
