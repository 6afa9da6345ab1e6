"""Measures whether documents that are packed into one row influence one another in a model.

Any layer of a model may let them, so this is measured before training with packing begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError, first_line
from ..layers import describe, is_state_space, logits_of
from ..lora.adapter import Adapter
from ..ops.functional import is_floating, undisturbed
from ..ops.segments import segments
from ..ops.watched_calls import calls_through

# Tokens of the first and of the second document of a row.
_FIRST = 32
_SECOND = 16
# The largest change that another document in the row may make in the logits of a token, relative to their mean size.
# Between rows that differ in nothing else, the products of a document are the same: the rest is routing of experts.
_INFLUENCE = 1e-3
# The same for the token in the middle, which routing leaves as it is: nothing on a CPU, and rounding at most elsewhere.
_MIDDLE = 1e-5
# The same for another place in the row, in the middle of all tokens. Rotary positions round differently there, in TF32
# to 2**-11, and a token in a hundred may go to another expert; a table of positions gives tenths.
_PLACE = 2e-2
# The same for a row that exceeds a length, beside the same row that does not: rounding alone, at the same places.
_BEYOND = 1e-4
# Names of the lengths beyond which layers mask, select, scale or cut rows in another way than on short rows.
_NAMES = ("window", "chunk_size", "topk", "max_position", "floor_scale")
# Lengths that training exceeds are lowered to this. A document alone does not exceed it, every token of one that
# follows another does, and no multiple of it stands where a document begins.
_LOWERED = 20
# The same for the number and the size of the blocks of keys that a layer selects.
_BLOCKS = 1
_BLOCK = 18
# A length that no row exceeds.
_RAISED = 64
# The weights repeat after so many numbers. It is a prime, so that no two rows of a matrix are the same.
_PERIOD = 65_521
# Codes of quantised weights are drawn without this bit of each byte, so that none of them is NaN.
_NO_NAN = 0xBFBFBFBF


class _Length(NamedTuple):
    """A number `owner[name]` beyond which so many tokens make a difference; short rows exceed the value `lowered`."""

    owner: dict[str, Any]
    name: str
    tokens: int
    lowered: int = _LOWERED


def check_packing(model: nn.Module, longest: int) -> None:
    """Refuse a model whose packed documents do not get the logits that each of them gets alone.

    The model runs with drawn weights in fp32, so that neither its own weights nor its dtype can hide an influence, on
    short rows; lengths in its config, such as windows, that training on rows of `longest` tokens exceeds are lowered.
    Call it while the patches are applied. The model holds the same arrays and lengths afterwards.
    """
    layers = describe(model)
    mamba = [
        str(layer.index)
        for layer in layers
        if layer.kind == "mamba" and not any(map(is_state_space, layer.module.modules()))
    ]
    if mamba:
        raise UserError(
            f"packing: layers {', '.join(mamba)} are Mamba layers of the first kind, whose state cannot restart "
            "between documents. "
            "Train this model without packing."
        )
    lengths = _lengths(model)
    with _drawn_weights(model, [layer.module for layer in layers]):
        influence = _influence(model, lengths, longest)
        if influence is None:
            return
        shorter = {length.tokens for length in lengths if length.tokens < longest}
        separate = max((tokens for tokens in shorter if _influence(model, lengths, tokens) is None), default=None)
    rows = f"on rows of {_FIRST + _SECOND:,} tokens"
    advice = "Train this model without packing."
    if separate is not None:
        names = sorted({length.name for length in lengths if length.tokens == separate})
        rows = f"on rows longer than {' and '.join(names)}, here {_LOWERED} in place of {separate:,}"
        advice = (
            f"Train this model without packing, or on rows of at most {separate:,} tokens (--max-seq-length, half of "
            "it for pairs)."
        )
    raise UserError(
        f"packing: a document that follows another in its row gets logits {influence:.1%} off those that it has "
        f"alone (measured in fp32 with drawn weights, {rows}), so a layer of {type(model).__module__} sees across "
        f"documents or counts positions from the row's start. {advice}"
    )


def _lengths(model: nn.Module) -> list[_Length]:
    """Return the lengths that short rows do not exceed: of the modules, of their configs, and of tables in these."""
    lengths: list[_Length] = []
    visited: set[int] = set()
    waiting: list[Any] = list(model.modules())
    while waiting:
        owner = waiting.pop()
        if id(owner) in visited:
            continue
        visited.add(id(owner))
        entries = owner if type(owner) is dict else getattr(owner, "__dict__", {})
        lengths += _among(entries)
        tables = [*entries.values(), *(owner.values() if isinstance(owner, nn.Module) else ())]
        # A config is a dataclass's instance.
        waiting += [table for table in tables if type(table) is dict or dataclasses.is_dataclass(type(table))]
    return lengths


def _among(entries: dict[str, Any]) -> Iterator[_Length]:
    """Yield the lengths among the entries of a module, a config or a table."""
    sizes = {
        name: int(value)
        for name, value in entries.items()
        if isinstance(name, str) and type(value) in (int, float) and math.isfinite(value)
    }
    for name, size in sizes.items():
        block = name.replace("topk_blocks", "block_size")
        if block != name and block in sizes:
            tokens = size * sizes[block]
            yield _Length(entries, name, tokens, _BLOCKS)
            yield _Length(entries, block, tokens, _BLOCK)
        elif any(word in name for word in _NAMES) and size > _LOWERED:
            yield _Length(entries, name, size)


def _influence(model: nn.Module, lengths: Sequence[_Length], longest: int) -> float | None:
    """Return how far logits of packed documents are off, within lengths and beyond those that `longest` tokens exceed;
    None if they are right. The model has drawn weights; UserError if it cannot compute a packed row.
    """
    exceeded = [length for length in lengths if length.tokens < longest]
    influences = []
    # Rounding alone sends a token to other experts once in a thousand models: a leak is there in every draw.
    for draw in range(2):
        documents = _documents(draw)
        try:
            with _with_lengths([(length, max(length.owner[length.name], _RAISED)) for length in lengths]):
                after_one, after_other = _behind_others(model, *documents)
                alone = logits_of(model, documents[-1])[0].astype(mx.float32)
                influence, place = _distances(after_one, after_other), _distances(after_one, alone)
            isolated = max(influence) < _INFLUENCE and median(influence) < _MIDDLE and median(place) < _PLACE
            if isolated and exceeded:
                with _with_lengths([(length, length.lowered) for length in exceeded]):
                    beyond_one, beyond_other = _behind_others(model, *documents)
                    influence, place = _distances(beyond_one, beyond_other), _distances(beyond_one, after_one)
                isolated = max(influence) < _INFLUENCE and median(influence) < _MIDDLE and median(place) < _BEYOND
        except ValueError as error:
            raise UserError(
                f"packing: {type(model).__module__} cannot compute a packed row, since it reads its mask in "
                f"another shape ({first_line(error)}). Train this model without packing."
            ) from error
        if isolated:
            return None
        influences.append(max(*influence, median(place)))
    return min(influences)


@contextmanager
def _with_lengths(lengths: Sequence[tuple[_Length, int]]) -> Iterator[None]:
    """Within the context, layers read the values given for some lengths."""
    before = [length.owner[length.name] for length, _ in lengths]
    for length, value in lengths:
        length.owner[length.name] = value
    try:
        yield
    finally:
        for (length, _), value in zip(lengths, before, strict=True):
            length.owner[length.name] = value


def _documents(draw: int) -> list[mx.array]:
    """Return the tokens [1, T] of two first documents and of a second one."""
    keys = mx.random.split(mx.random.key(draw), 3)
    lengths = (_FIRST, _FIRST, _SECOND)
    return [mx.random.randint(1, 60, (1, length), key=key) for length, key in zip(lengths, keys, strict=True)]


def _behind_others(model: nn.Module, one: mx.array, other: mx.array, tested: mx.array) -> tuple[mx.array, mx.array]:
    """Return the logits [T, V] of a document behind each of two others."""
    rows = mx.concatenate([mx.concatenate([first, tested], axis=1) for first in (one, other)])
    with segments(mx.array([[0] * _FIRST + [1] * _SECOND] * 2, mx.int32)):
        logits = logits_of(model, rows)[:, _FIRST:].astype(mx.float32)
    return logits[0], logits[1]


def _distances(logits: mx.array, others: mx.array) -> list[float]:
    """Return how far the logits of each token [T, V] are from others, relative to the mean size of these."""
    distances: Any = (mx.abs(logits - others).mean(axis=1) / mx.abs(others).mean()).tolist()
    # NaN is not below a limit either.
    return [distance if math.isfinite(distance) else math.inf for distance in distances]


@contextmanager
def _drawn_weights(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context, every weight of `model` but those of adapters is a drawn one, floating-point ones in fp32.

    Its own weights may hide the effect of its layers: an output projection of zero passes nothing on, and 16 bits round
    small differences away. Each layer holds its drawn weights, the same ones in every call, while it is called, and its
    result is computed before it returns, so that there is room for one layer's weights in fp32.
    """
    table = mx.random.uniform(-1, 1, (_PERIOD,), key=mx.random.key(0))
    inside = {id(module) for layer in layers for module in layer.modules()}
    places = {id(layer): place for place, layer in enumerate(layers, 1)}

    def drawn(layer: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with undisturbed(layer):
            _draw(layer.modules(), table, places[id(layer)])
            result = call(*arguments, **options)
            mx.eval(result)
        return result

    with undisturbed(model), calls_through(layers, drawn):
        _draw([module for module in model.modules() if id(module) not in inside], table, 0)
        yield


def _draw(modules: Sequence[nn.Module], table: mx.array, start: int) -> None:
    """Put drawn arrays in the place of the parameters of `modules`. MLX draws those that are used when they are."""
    for number, module in enumerate(modules):
        trained = isinstance(module, Adapter) or "lora_a" in module
        numbers = _numbers(table, start * 9_973 + number * 97)
        for name, array in list(module.items()):
            if not isinstance(array, mx.array) or name.startswith("_"):
                continue
            if is_floating(array):
                drawn = array.astype(mx.float32) if trained else _floats(array.shape, numbers)
            elif array.dtype == mx.uint32 and "scales" in module:
                drawn = (numbers(array.size) * 2.0**31).astype(mx.int32).view(mx.uint32).reshape(array.shape) & _NO_NAN
            else:
                continue
            dict.__setitem__(module, name, drawn)


def _numbers(table: mx.array, start: int) -> Callable[[int], mx.array]:
    """Return a function that gives so many numbers between -1 and 1, from a place in the table on."""
    start %= _PERIOD

    def numbers(size: int) -> mx.array:
        return mx.tile(mx.concatenate([table[start:], table[:start]]), -(-size // _PERIOD))[:size]

    return numbers


def _floats(shape: tuple[int, ...], numbers: Callable[[int], mx.array]) -> mx.array:
    """Return weights that pass on about as much as they are given, and vectors (norms, biases) from 0.1 to 1."""
    drawn = numbers(math.prod(shape)).reshape(shape)
    if len(shape) < 2:
        return 0.55 + 0.45 * drawn
    # A convolution that mixes no channels has one input in its last axis.
    inputs = shape[-1] if shape[-1] > 1 else shape[-2]
    return drawn * math.sqrt(3 / inputs)
