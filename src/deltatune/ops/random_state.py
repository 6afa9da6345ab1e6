"""MLX's random key, read and set. `mx.random.seed` takes a number, and inside a traced function a key has none yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


def get_key() -> mx.array:
    """The key [2] uint32 that the next draw without a key of its own will split."""
    return _cell()[0]


def set_key(key: mx.array) -> None:
    """Draw from `key` [2] uint32 on, in this thread."""
    _cell()[0] = key


@contextmanager
def drawing_from(key: mx.array) -> Iterator[None]:
    """Draw from `key` within the context, and go on afterwards as if nothing had been drawn."""
    held = get_key()
    set_key(key)
    try:
        yield
    finally:
        set_key(held)


def _cell() -> list:
    """The list of one key behind `mx.random.state`, which in older versions is that list itself."""
    state: Any = mx.random.state
    if isinstance(state, list):
        return state
    # The list's own iterator is the only way to it; pickling an iterator names what it iterates over.
    _, (cell,), *_ = iter(state).__reduce__()
    if not isinstance(cell, list) or len(cell) != 1:
        raise RuntimeError("deltatune does not know how this version of mlx keeps its random state.")
    return cell
