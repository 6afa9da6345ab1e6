"""Notes which layers of a model call a patched function, and the implementation of each call in training.

The model is traced: comparing the names of functions would miss a layer that holds another function.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import mlx.core as mx

from ..ops.tracing import dispatch
from ..ops.tracing.dispatch import NotedCall

# The tokens of the row for which a noted call asks for its implementation.
_ROW = 512


@contextmanager
def noting() -> Iterator[list[NotedCall]]:
    """Note every call of a patched function within a `with` block in a list. Calls inside it do not count outside."""
    calls: list[NotedCall] = []
    with dispatch.having(callers=calls, recurrences=Counter(), attentions=Counter()):
        yield calls


def asked() -> bool:
    """Whether calls are noted, and their implementations may be asked for."""
    told = dispatch.current()
    return told.callers is not None and told.trials


def note(operator: str, implementation: Callable[[], str] | None) -> None:
    """Note a call of an operator, "gated delta", "linear attention", "attention" or "experts", where calls are noted.

    `implementation` names the one that serves the call in training, as for of_a_row(); None where upstream's code does.
    """
    calls = dispatch.current().callers
    if calls is not None:
        name = implementation() if implementation is not None and asked() else ""
        calls.append(NotedCall(operator, _selves(), name))


def of_a_row(arrays: Sequence[mx.array], axis: int = 1) -> list[mx.array]:
    """Return arrays of a row's tokens along `axis`, all of them the first one of each of `arrays`."""
    first = mx.zeros(_ROW, mx.int32)
    return [mx.take(array, first, axis) for array in arrays]


def _selves() -> list[int]:
    """The ids of the `self` of every stack frame above this one."""
    identities: list[int] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            identities.append(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return identities
