"""Finds the states that layers carry from one piece of a row to the next, by the caches with which a model decodes."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from ..layers import LIGHTNING, LayerInfo, is_state_space, logits_of
from ..ops.functional import undisturbed
from ..ops.pieces import Carry, States
from ..ops.random_state import drawing_from
from ..ops.segments import segments
from ..ops.watched_calls import calls_through

# The caches with which a language model decodes.
empty_caches = make_prompt_cache
# In the place of the cache of a layer of which it is not known.
_UNKNOWN = object()


def repeat_row(caches: Sequence[Any], rows: int) -> None:
    """Let caches of one row hold it so many times."""
    for cache in caches:
        # A state may hold numbers, such as an offset, too.
        cache.state = tree_map(
            lambda leaf: mx.repeat(leaf, rows, axis=0) if isinstance(leaf, mx.array) else leaf, cache.state
        )


def carries(model: nn.Module, layers: Sequence[LayerInfo]) -> list[Carry | None]:
    """Return the carry of each layer of describe(); None for a layer that runs on whole rows only.

    Which cache a layer is given in decoding, and whether it returns its rows alone, is seen in a forward pass without
    an evaluation; a layer that decodes without one carries nothing. Layers of mlx-vlm take positions besides, windows
    and Mamba's first kind have caches of other kinds, and shared keys and values belong to several layers.
    """
    if not type(model).__module__.startswith("mlx_lm."):
        return [None] * len(layers)
    caches = _caches_seen(model, layers)
    times = Counter(id(cache) for cache in caches)
    return [
        _carry(layer, cache) if cache is None or times[id(cache)] == 1 else None
        for layer, cache in zip(layers, caches, strict=True)
    ]


def kept_by_recurrence(values: Iterable[Any]) -> list[mx.array]:
    """Return the states of a recurrence in the caches among some values; a layer's output need not depend on them.

    Until they are computed, they hold their inputs: those of a convolution over a whole prompt.
    """
    states: list[mx.array] = []
    for value in values:
        # mlx-lm and mlx-vlm have a class of this name each.
        if any(base.__name__ == ArraysCache.__name__ for base in type(value).__mro__):
            states += [array for array in value.cache if array is not None]
        elif isinstance(value, States):
            states += value.handed
    return states


def _caches_seen(model: nn.Module, layers: Sequence[LayerInfo]) -> list[Any]:
    """Return each layer's cache for a prompt of two tokens; _UNKNOWN if it is called often or returns more."""
    seen: dict[int, list[Any]] = {id(layer.module): [] for layer in layers}

    def noting(layer: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bound = inspect.signature(type(layer).__mro__[1].__call__).bind(layer, *arguments, **options).arguments
        result = call(*arguments, **options)
        rows = list(bound.values())[1]
        alone = isinstance(result, mx.array) and isinstance(rows, mx.array) and result.shape == rows.shape
        seen[id(layer)].append(bound.get("cache") if alone else _UNKNOWN)
        return result

    watched = calls_through([layer.module for layer in layers], noting)
    with drawing_from(mx.random.key(0)), undisturbed(model), segments(None), watched:
        logits_of(model, mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
    caches = [caches_seen[0] if len(caches_seen := seen[id(layer.module)]) == 1 else _UNKNOWN for layer in layers]
    # The watching classes refer to this until Python collects them, and the caches hold arrays.
    seen.clear()
    return caches


def _carry(layer: LayerInfo, cache: object) -> Carry | None:
    if cache is None:
        takes_cache = "cache" in inspect.signature(type(layer.module).__call__).parameters
        return Carry() if layer.kind == "other" and takes_cache else None
    if type(cache) is CacheList and list(map(type, cache.caches)) == [ArraysCache, KVCache]:
        carry = _carry(layer, cache.caches[0])
        return carry and Carry(carry.states, attends=True)
    if type(cache) is ArraysCache:
        # A recurrence is that of Mamba-2, or of Lightning attention by the code beside its class.
        known = layer.kind == "delta" or any(
            is_state_space(module) or hasattr(sys.modules[type(module).__module__], LIGHTNING)
            for module in layer.module.modules()
        )
        return Carry(len(cache.cache)) if known else None
    if layer.kind != "attention" or type(cache) is not KVCache:
        return None
    # The patch of latent attention serves whole rows alone.
    latent = any(name.startswith("kv_a_proj") for module in layer.module.modules() for name in module.children())
    return Carry(attends=True, packed=not latent)
