"""Random numbers from a key of deltatune's own, so that draws can be repeated and continued.

MLX has no function that sets its random key. Within the contexts of this module, the functions of mx.random get their
keys from one of deltatune's, which each call splits as MLX splits its own. No draw there reads MLX's random state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .. import upstream
from .tracing import trace

# The functions of mx.random that take a key, and the place of that argument.
DRAWS = {
    "bernoulli": 2,
    "categorical": 4,
    "gumbel": 2,
    "laplace": 4,
    "multivariate_normal": 4,
    "normal": 4,
    "permutation": 2,
    "randint": 4,
    "truncated_normal": 4,
    "uniform": 4,
}

_lock = threading.Lock()
_originals: dict[str, Callable[..., mx.array]] = {}
_open = 0


@contextmanager
def drawing_with(state: list[mx.array]) -> Iterator[None]:
    """Within the context, draws continue from the key in `state`, [2] uint32, and leave the next key there."""
    with trace.having(random_key=state), _served():
        yield


@contextmanager
def drawing_from(key: mx.array) -> Iterator[None]:
    """Within the context, draw from `key`; afterwards the draws continue as if nothing had been drawn."""
    with drawing_with([key]):
        yield


@contextmanager
def repeatable() -> Iterator[mx.array]:
    """Yield a key; drawing_from(key) repeats the draws within the context.

    Outside the contexts of this module, the draws also move MLX's random state on, as they would without this one.
    """
    state = trace.current().random_key
    if state is not None:
        yield state[0]
        return
    key = upstream.random_key()
    counted = _Counted([key])
    with drawing_with(counted):
        yield key
    for _ in range(counted.draws):
        mx.random.bernoulli()


def skip() -> None:
    """Move on to a key that no draw before this call has used."""
    state = trace.current().random_key
    if state is None:
        mx.random.bernoulli()
    else:
        state[0] = mx.random.split(state[0])[1]


class _Counted(list):
    draws = 0

    def __setitem__(self, at: Any, key: Any) -> None:
        super().__setitem__(at, key)
        self.draws += 1


@contextmanager
def _served() -> Iterator[None]:
    """Within the context, the functions of mx.random ask for deltatune's key; the last context to end restores them."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _originals.update({name: getattr(mx.random, name) for name in DRAWS if hasattr(mx.random, name)})
            for name, original in _originals.items():
                setattr(mx.random, name, _with_key(original, DRAWS[name]))
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                for name, original in _originals.items():
                    setattr(mx.random, name, original)
                _originals.clear()


def _with_key(original: Callable[..., mx.array], place: int) -> Callable[..., mx.array]:
    def draw(*arguments: Any, **options: Any) -> mx.array:
        state = trace.current().random_key
        if state is None or options.get("key") is not None or len(arguments) > place:
            return original(*arguments, **options)
        keys = mx.random.split(state[0])
        state[0] = keys[0]
        return original(*arguments, **{**options, "key": keys[1]})

    return draw
