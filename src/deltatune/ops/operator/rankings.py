"""Keeps for a run which implementation of an operator serves which class of calls, so that a continuation's bits agree.

Outside a run nothing is kept: the verdicts decide about each call. A class that a run first meets after its last save
is chosen anew if the run is killed and continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from ..tracing import dispatch


@dataclass
class Rankings:
    """The choices of a run: by class of calls, the names of the right implementations, and why the first is the first.

    A class that is not known yet is ranked by measured times if `by_time`, where the device has them measured.
    """

    names: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    by_time: bool = True

    def continue_with(self, names: Mapping[str, Sequence[str]]) -> None:
        """Take over the choices of the run that is continued."""
        for key, ranked in names.items():
            if self.names.get(key) != list(ranked):
                self.names[key] = list(ranked)
                self.reasons[key] = "as in the run that is continued"


def current() -> Rankings | None:
    """Return the choices of the run inside which this is called; None outside a run."""
    return cast("Rankings | None", dispatch.current().rankings)


@contextmanager
def of_run() -> Iterator[Rankings]:
    """Within the context, choices are kept; a context inside another one keeps them with those of the outer one."""
    outer = current()
    if outer is not None:
        yield outer
        return
    new = Rankings()
    with dispatch.having(rankings=new):
        yield new
