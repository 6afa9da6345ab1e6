"""Random keys that can be drawn twice: a recomputed layer must drop what it dropped the first time.

`mx.random` cannot be wound back inside a trace. So a function that is traced once for its value and again for its
gradient runs, both times, under the same Replay; what draws with `next_key()` then gets the same keys.
"""

from __future__ import annotations

from contextvars import ContextVar, Token

import mlx.core as mx

_current: ContextVar[Replay | None] = ContextVar("replay", default=None)


class Replay:
    """A stream of keys that starts again at every `with`. It draws on its surroundings once, when first asked."""

    def __init__(self) -> None:
        self._first: mx.array | None = None
        self._next: mx.array | None = None
        self._outer: Replay | None = None
        self._token: Token | None = None

    def __enter__(self) -> Replay:
        if self._first is None:
            self._outer = _current.get()
        self._next = self._first
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def _draw(self) -> mx.array:
        if self._next is None:
            self._first = self._next = self._outer._draw() if self._outer else _fresh()
        self._next, key = mx.random.split(self._next)
        return key


def next_key() -> mx.array | None:
    """A key for one draw: the next of the innermost Replay, or None, MLX's own random state, outside any."""
    replay = _current.get()
    return None if replay is None else replay._draw()


def _fresh() -> mx.array:
    return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
