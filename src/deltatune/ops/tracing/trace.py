"""The trace: everything that steers a layer's forward and is no argument of it.

Models of other packages call their layers as they like, so the step around a layer cannot pass arguments to the
functions inside it. It sets one frozen `Trace` instead, which `current()` returns and `having()` changes for a while.
docs/how/trace.md has a picture of who changes it and who reads it.

A context variable belongs to a thread: a thread that starts within a step begins with the trace outside all contexts.
MLX runs Python when it traces a function and when it derives a gradient, not when it computes. So a trace must be in
force while mx.value_and_grad or a compiled function is called, and does not matter afterwards. The second run of a
checkpoint happens within that call, but after the contexts around the layer have ended; checkpoint.py and pieces.py
say which of them they bring back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .known import Known


class RouterWatch(NamedTuple):
    """How the routers of a mixture are watched.

    Attributes:
        real: Which positions of the batch, or of the piece that runs, hold tokens that count, [B, T] bool.
        trained: Whether the routers' sums get gradients.
    """

    real: mx.array
    trained: bool


@dataclass(frozen=True)
class NotedCall:
    """A call of a patched function.

    Attributes:
        operator: The operator: "gated delta", "attention" or "experts".
        callers: The ids of the `self` of every stack frame above it.
        implementation: The name of the implementation that serves it in training; "" where upstream's code does.
    """

    operator: str
    callers: list[int]
    implementation: str


@dataclass(frozen=True)
class Trace:
    """The settings and notes of a step for the functions inside a layer.

    Attributes:
        whole_rows: Whether rows are trained or scored whole, which a decoder's are not.
        segments: The documents of the packed batch that runs, [B, T] integers; None for rows of one document.
        piece: Where the piece that a layer runs on begins and ends in its row; None for a whole row.
        recomputed: Whether the layer that runs is checkpointed, so that it keeps nothing for its backward pass.
        once: Whether a training step is traced, which nobody maps or differentiates twice.
        cheap_twice: Whether a backward pass recomputes the results of cheap operators.
        random_key: The key that the next draw splits, as the one item of a list, so that mx.compile can take it as a
            state; None where MLX's own key serves.
        side_outputs: Where arrays go that a layer computes beside its output; None if nobody collects them.
        routers: How the routers of a mixture are watched; None if they are not.
        read_together: The adapters that read one input, in groups; None where each is computed by itself.
        chosen_experts: Where the experts that a block calls leave the indices of those chosen; None outside a block
            with experts that wait for their scores.
        attending: Whether deltatune's attention runs, so that its own calls of MLX's attention are not redirected to
            it.
        upstream_serves: Whether upstream serves the running call of the recurrence, with all calls inside it.
        callers: The calls of patched functions so far (patches/callers.py); None if nobody asks.
        recurrences: Calls of the recurrence, counted by implementation.
        attentions: Calls of attention, counted by implementation.
        next_tokens: Whether a compiled step gives all rows of a batch their next token (models/batch_decoder.py), which
            takes as long as its kernels are many.
        small_case: Where cheap operators note that they serve, whatever the size of their arrays; None outside the
            small cases of patches.
        trials: Whether an implementation may serve that has to be tried on this machine before.
        rankings: Which implementation of an operator serves which class of calls in a run, by operator/rankings.py;
            None outside a run.
        builders: The threads that build kernels, which are then not launched; None where kernels are launched.
        foreseen: The trials of kernels that are being built for foreseen calls (ops/operator/foresight.py); None where
            calls are made.
        known: The facts about arrays (known.py), by the arrays themselves; the outermost `having` begins with none.
    """

    whole_rows: bool = False
    segments: mx.array | None = None
    piece: tuple[int, int] | None = None
    recomputed: bool = False
    once: bool = False
    cheap_twice: bool = False
    random_key: list[mx.array] | None = None
    side_outputs: list[mx.array] | None = None
    routers: RouterWatch | None = None
    read_together: Sequence[Sequence[nn.Module]] | None = None
    chosen_experts: list[mx.array] | None = None
    attending: bool = False
    upstream_serves: bool = False
    callers: list[NotedCall] | None = None
    recurrences: Counter[str] = field(default_factory=Counter)
    attentions: Counter[str] = field(default_factory=Counter)
    next_tokens: bool = False
    small_case: list[str] | None = None
    trials: bool = True
    rankings: object | None = None
    builders: Executor | None = None
    foreseen: set[Hashable] | None = None
    known: Known = field(default_factory=Known)


_OUTSIDE = Trace()
_NAMES = frozenset(field.name for field in fields(Trace))
_current: ContextVar[Trace] = ContextVar("deltatune's trace", default=_OUTSIDE)

# Return the trace that is in force. It is the variable's own method, since decoders ask at every call of a layer.
current: Callable[[], Trace] = _current.get


class having:  # noqa: N801 - it reads as a function: `with trace.having(piece=(0, 128)):`
    """Within the context, the trace has other values of these attributes.

    Args:
        changes: The new values, by the names of the trace's attributes.

    Raises:
        TypeError: The trace has no such attribute.

    Example:
        >>> with having(piece=(0, 128)):
        ...     assert current().piece == (0, 128)
    """

    def __init__(self, **changes: Any):
        if not changes.keys() <= _NAMES:
            raise TypeError(f"a trace has no {', '.join(sorted(changes.keys() - _NAMES))}.")
        self._changes = changes

    def __enter__(self) -> None:
        outer = _current.get()
        if outer is _OUTSIDE:
            self._changes.setdefault("known", Known())
        inner = object.__new__(Trace)
        # dataclasses.replace would take ten times as long; a block of experts opens a context for each token decoded.
        vars(inner).update(vars(outer), **self._changes)
        self._token: Token[Trace] = _current.set(inner)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
