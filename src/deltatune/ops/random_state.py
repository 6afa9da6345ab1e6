"""Reads and sets MLX's random key.

`mx.random.seed` cannot restore a random state, since a key that draws have split is not the key of any seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


def get_key() -> mx.array:
    """Return the key, [2] uint32, that the next draw without a key of its own will split."""
    return _state()[0]


def set_key(key: mx.array) -> None:
    """Make this thread's draws continue from `key`, [2] uint32."""
    _state()[0] = key


@contextmanager
def drawing_from(key: mx.array) -> Iterator[None]:
    """Within the context, draw from `key`; afterwards the draws continue as if nothing had been drawn."""
    original = get_key()
    set_key(key)
    try:
        yield
    finally:
        set_key(original)


def _state() -> list:
    """Return the list behind `mx.random.state` whose one item is the key; in older versions `state` is that list."""
    state: Any = mx.random.state
    if isinstance(state, list):
        return state
    # MLX gives access to the list only through its iterator, and pickling an iterator names what it iterates over.
    _, (key_list,), *_ = iter(state).__reduce__()
    if not isinstance(key_list, list) or len(key_list) != 1:
        raise RuntimeError("deltatune does not know where this version of mlx keeps its random state.")
    return key_list
