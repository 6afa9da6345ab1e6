"""Runs a decoder layer on one piece of a batch after another, so that no array inside it is as large as the batch.

A batch is cut between its rows, or across all of them if a row alone is long. Whole rows hand nothing on. Where rows
are cut, a layer carries from piece to piece the arrays of its cache in decoding: a recurrence its states, attention its
keys and values. So every layer that can read a prompt piece by piece can be trained piece by piece. Kept for the
backward pass are the layer's input and the states between the pieces. The backward pass takes the pieces from last to
first, recomputes each one, and adds up the gradients of the weights in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .functional import holding, is_floating, recomputed, trainable, undisturbed, with_gradient
from .layer_cut import ROWS, TOKENS, LayerCut
from .random_state import drawing_from, repeatable, skip
from .segments import rule_of
from .tracing import side_outputs, trace
from .tracing.turns import Turn, blank


class States:
    """The states of a recurrent layer before a piece, in the place of mlx-lm's ArraysCache; None at a row's start."""

    lengths = left_padding = None

    def __init__(self, arrays: Sequence[mx.array | None]):
        self.arrays = list(arrays)

    def __getitem__(self, index: int) -> mx.array | None:
        return self.arrays[index]

    def __setitem__(self, index: int, state: mx.array) -> None:
        self.arrays[index] = state

    def advance(self, tokens: int) -> None:
        """Note that the layer has read so many tokens, which only matters for padded prompts."""

    @property
    def handed(self) -> list[mx.array]:
        """The arrays that the piece hands on; a convolution's last rows are a slice, which would hold all rows."""
        return [mx.contiguous(array) for array in self.arrays if array is not None]

    @property
    def following(self) -> list[mx.array]:
        """The arrays that the next piece gets."""
        return self.handed


class KeysAndValues:
    """The keys and values of an attention layer, in the place of mlx-lm's KVCache.

    `offset` tokens came before the piece, with keys and values [B, heads, offset, size]; None if nothing reads them.
    """

    def __init__(self, offset: int, before: Sequence[mx.array] | None):
        self.offset = offset
        self._before = before
        # The piece hands on its own keys and values; the next one gets those up to its end.
        self.handed: list[mx.array] = []
        self.following: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the keys and values of the piece; return those of all tokens up to its end."""
        self.offset += keys.shape[2]
        self.handed = self.following = [keys, values]
        if self._before is not None:
            self.following = [
                mx.concatenate(list(pair), axis=2) for pair in zip(self._before, self.handed, strict=True)
            ]
        return self.following[0], self.following[1]


class StatesAndKeys(NamedTuple):
    """The pair of caches of a layer with a recurrence beside attention, as Falcon-H1 has it."""

    states: States
    keys: KeysAndValues

    @property
    def handed(self) -> list[mx.array]:
        return self.states.handed + self.keys.handed

    @property
    def following(self) -> list[mx.array]:
        return self.states.following + self.keys.following


@dataclass(frozen=True)
class Carry:
    """The arrays that a layer carries from one piece to the next: states of a recurrence, then keys and values.

    It carries none where no token sees another. Unless it is `packed`, a piece of attention cannot be told which
    documents its keys belong to.
    """

    states: int = 0
    attends: bool = False
    packed: bool = True

    @property
    def empty(self) -> tuple[None, None] | None:
        """The cache with which the layer is called in training."""
        return (None, None) if self.states and self.attends else None


def divisible(carry: Carry | None, arguments: Sequence[tuple[str, Any]]) -> tuple[mx.array | None, dict[str, Any]]:
    """Return x and the options for a call of in_pieces(), or None for a call that cannot be made in pieces.

    The layer must take x [B, T, D] first, and then at most a mask that a piece can be given as well: none or, for
    attention, "causal", also within the documents of a packed row; and the offset of the first position. A layer that
    attends without a mask sees later tokens, which no piece can. `arguments` have their names.
    """
    (_, x), *others = arguments
    if carry is None or not isinstance(x, mx.array) or x.ndim != 3 or not is_floating(x):
        return None, {}
    others = [(name, value) for name, value in others if name != "cache" or value != carry.empty]
    offset = {name: value for name, value in others if name == "offset" and type(value) is int and value == 0}
    options = {name: value for name, value in others if value is not None and name not in offset}
    unset = {name: None for name, value in others if value is None}
    for name, value in options.items():
        rule = rule_of(value) if carry.packed and isinstance(value, mx.array) else None
        if rule is not None and rule.window is None and rule.segments is not None and not rule.read:
            options[name] = "causal"
    plain = all(isinstance(value, str) for value in options.values())
    fits = plain and list(options.values()) == ["causal"] * carry.attends
    return (x, unset | offset | options) if fits else (None, {})


def in_pieces(
    layer: Callable[..., mx.array], module: nn.Module, carry: Carry, x: mx.array, cut: LayerCut, **options: Any
) -> mx.array:
    """Return layer(x, **options) [B, T, D], computed one piece after another in both passes.

    `module` has the trainable parameters that `layer` uses. Options are those of divisible(). A layer that does not set
    its states or read its keys and values, as `carry` says, raises ValueError. Source: Chen et al., arXiv 1604.06174,
    who keep the states between segments of a recurrence.
    """
    paths, parameters = trainable(module)
    told = trace.current()
    if cut.axis == ROWS:
        # Whole rows hand nothing on.
        options["cache"] = carry.empty
        carry = Carry()
    spans = cut.spans(inner=any(layer is module for layer in told.inner_layers))
    pieces = _Pieces(layer, module, paths, carry, cut, spans, options, told.segments, told.side_outputs is not None)
    with repeatable() as key:
        y, *more = with_gradient(pieces.forward, pieces.backward)(mx.stop_gradient(key), *parameters, x)
        # The next layer has to draw other random numbers than this one.
        skip()
    side_outputs.collect(more[pieces.saved :])
    return y


@dataclass(frozen=True)
class _Pieces:
    """One call of a layer in pieces. It holds no array that the call computed, as functions of MLX must not."""

    layer: Callable[..., mx.array]
    module: nn.Module
    paths: list[str]
    carry: Carry
    cut: LayerCut
    # Where each piece begins and ends.
    spans: list[Turn]
    options: dict[str, Any]
    documents: mx.array | None
    # Whether the layer's side outputs are collected.
    collects: bool

    @property
    def saved(self) -> int:
        """How many states of a recurrence are kept for the backward pass."""
        return self.carry.states * (len(self.spans) - 1)

    def forward(self, key: mx.array, *inputs: mx.array) -> list[mx.array]:
        """Return y, for a recurrence the states after each piece but the last, and the layer's side outputs."""
        *parameters, x = inputs
        keys = mx.random.split(key, len(self.spans))
        ys: list[mx.array] = []
        saved: list[mx.array] = []
        before: list[mx.array] = []
        aside: list[mx.array] = []
        for number, span in enumerate(self.spans):
            if span.left_out:
                like, carry = self._likes(number + 1, keys, self.documents, parameters, x)
                before = self._blank_carry(span, carry, ys[-1:] or [x])
                ys.append(blank(like, span.stop - span.start, ys[-1:] or [x], self.cut.axis))
                saved += before[: self.carry.states]
                continue
            rows = self.cut.part(x, span)
            if ys:
                rows = mx.depends([rows], [ys[-1]])[0]
                before = self._last_states(number, before)
            with side_outputs.collecting(self.collects) as of_piece:
                y, cache = self._run(number, keys, self.documents, parameters, rows, before)
            aside = _sums(aside, of_piece)
            ys.append(y)
            before = cache.following
            if len(saved) < self.saved:
                saved += before[: self.carry.states]
        return [mx.concatenate(ys, axis=self.cut.axis), *saved, *aside]

    def backward(self, primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        dy = cotangents[0]
        documents = self.documents
        saved = list(outputs[1 : 1 + self.saved])
        states = self.carry.states
        d_aside = list(cotangents[1 + self.saved :])
        # Nothing is recomputed before its cotangent exists.
        key, *inputs = mx.depends(list(primals), [dy])
        documents = None if documents is None else mx.depends([documents], [dy])[0]
        *parameters, x = inputs
        keys = mx.random.split(key, len(self.spans))
        totals: list[mx.array] = []
        dxs: list[mx.array] = []
        # The gradients of the states behind a piece, which the next one gives, and of each piece's keys and values.
        d_states: list[mx.array] = []
        d_keys: list[list[mx.array]] = [[] for _ in self.spans]
        with undisturbed(self.module):
            keys_and_values = self._keys_and_values(keys, documents, parameters, x) if self.carry.attends else []
            for number, span in reversed([*enumerate(self.spans)]):
                parts = [self.cut.part(whole, span) for whole in (x, dy)]
                arrays = parts + self._before(number, saved, keys_and_values)
                # Those of attention are sums in fp32. The last piece has none.
                d_carry = d_states + d_keys.pop()
                likes = saved[:states] + keys_and_values
                d_next = [d.astype(like.dtype) for d, like in zip(d_carry, likes, strict=False)]
                if span.left_out:
                    dxs.insert(0, blank(dxs[0], span.stop - span.start, [dxs[0], *totals, *d_next], self.cut.axis))
                    d_states = d_next[:states]
                    continue
                if dxs:
                    arrays = mx.depends(arrays, [dxs[0], *totals, *d_next, *chain.from_iterable(d_keys)])
                gradients = self._piece_gradients(number, keys, documents, parameters, arrays, d_next, d_aside)
                d_parameters = gradients[: len(parameters)]
                dx, *d_before = gradients[len(parameters) :]
                totals = _sums(totals, d_parameters)
                dxs.insert(0, dx)
                d_states = d_before[:states]
                for at, (start, stop, _) in enumerate(self.spans[: len(d_keys)]):
                    d_keys[at] = _sums(d_keys[at], [d[:, :, start:stop] for d in d_before[states:]])
        weights = [total.astype(array.dtype) for total, array in zip(totals, parameters, strict=True)]
        dx = mx.concatenate(dxs, axis=self.cut.axis)
        return [mx.zeros_like(key), *weights, mx.depends([dx], weights)[0] if weights else dx]

    def _run(
        self,
        number: int,
        keys: mx.array,
        documents: mx.array | None,
        parameters: Sequence[mx.array],
        rows: mx.array,
        before: Sequence[mx.array],
    ) -> tuple[mx.array, States | KeysAndValues | StatesAndKeys]:
        """Call the layer on a piece with the carry of the piece before it; return y and the layer's cache."""
        start, stop, _ = self.spans[number]
        count, attends = self.carry.states, self.carry.attends
        states = States(_restarted(before[:count], documents, start) if before else [None] * count)
        keys_before = KeysAndValues(start, before[count:] or None)
        cache: States | KeysAndValues | StatesAndKeys = states
        if attends:
            cache = StatesAndKeys(states, keys_before) if count else keys_before
        # Queries of attention see keys of earlier pieces, so their documents are needed as well.
        first = 0 if before and attends else start
        readable = None if documents is None else self.cut.part(documents, (first, stop))
        routers = trace.current().routers
        if routers is not None:
            routers = routers._replace(real=self.cut.part(routers.real, (start, stop)))
        piece = None
        options = self.options
        if self.cut.axis == TOKENS:
            piece = (start, stop)
            options = options | {"cache": cache} | ({"offset": start} if "offset" in options else {})
        having = trace.having(segments=readable, routers=routers, piece=piece)
        with holding(self.module, self.paths, parameters), recomputed(), having, drawing_from(keys[number]):
            y = self.layer(rows, **options)
        if len(cache.handed) < count + 2 * attends or y.shape != rows.shape:
            raise ValueError(
                f"{type(self.module).__name__} cannot run on pieces of a row: it returned {list(y.shape)} for "
                f"{list(rows.shape)}, or did not write to its cache."
            )
        return y, cache

    def _likes(
        self, number: int, keys: mx.array, documents: mx.array | None, parameters: Sequence[mx.array], x: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        """Return arrays that are like y and the carry of pieces, but not computed, since nothing reads their values."""
        with side_outputs.collecting(self.collects):
            y, cache = self._run(number, keys, documents, parameters, self.cut.part(x, self.spans[number]), [])
        return y, cache.handed

    def _keys_and_values(
        self, keys: mx.array, documents: mx.array | None, parameters: Sequence[mx.array], x: mx.array
    ) -> list[mx.array]:
        """Compute the keys and values of all pieces but the last again. MLX is lazy: nothing else is computed."""
        keys_and_values: list[list[mx.array]] = []
        for number, span in enumerate(self.spans[:-1]):
            if span.left_out:
                after = keys_and_values[-1] if keys_and_values else [x]
                likes = self._likes(number + 1, keys, documents, parameters, x)[1][-2:]
                keys_and_values.append([blank(array, span.stop - span.start, after, 2) for array in likes])
                continue
            rows = self.cut.part(x, span)
            if keys_and_values:
                rows = mx.depends([rows], keys_and_values[-1])[0]
            _, cache = self._run(number, keys, documents, parameters, rows, [])
            keys_and_values.append(cache.handed[-2:])
        return [mx.concatenate(list(parts), axis=2) for parts in zip(*keys_and_values, strict=True)]

    def _blank_carry(self, span: Turn, before: Sequence[mx.array], after: Sequence[mx.array]) -> list[mx.array]:
        """Return the carry after pieces that are left out: the states between them all, and keys and values."""
        count = self.carry.states
        states = [blank(state, span.left_out * len(state), after) for state in before[:count]]
        return states + [blank(array, span.stop, after, 2) for array in before[count:]]

    def _last_states(self, number: int, before: list[mx.array]) -> list[mx.array]:
        """Return the carry before a piece, with the last of the states between the pieces that are left out."""
        left_out = self.spans[number - 1].left_out
        count = self.carry.states
        return [state[: len(state) // left_out] for state in before[:count]] + before[count:] if left_out else before

    def _before(self, number: int, saved: list[mx.array], keys_and_values: list[mx.array]) -> list[mx.array]:
        """Return the carry of the piece before this one; nothing for the first."""
        if number == 0:
            return []
        states = saved[(number - 1) * self.carry.states : number * self.carry.states]
        keys = [array[:, :, : self.spans[number][0]] for array in keys_and_values]
        return self._last_states(number, states) + keys

    def _piece_gradients(
        self,
        number: int,
        keys: mx.array,
        documents: mx.array | None,
        parameters: list[mx.array],
        arrays: list[mx.array],
        d_next: list[mx.array],
        d_aside: list[mx.array],
    ) -> list[mx.array]:
        """Return the gradients of the parameters, of the piece's rows, and of the carry into the piece.

        `arrays` are the rows, the cotangent of y, and the carry into the piece; `d_next` are the gradients of its own
        carry, none for the last piece; `d_aside` are those of the sums of the pieces' side outputs.
        """
        rows, d_rows, *before = arrays
        count = len(parameters)

        def recompute(*values: mx.array) -> list[mx.array]:
            with side_outputs.collecting(self.collects) as aside:
                y, cache = self._run(number, keys, documents, values[:count], values[count], values[count + 1 :])
            # mx.vjp drops the cotangent of an output that is itself a stop_gradient, so contiguous wraps it.
            return [mx.contiguous(output) for output in ([y, *cache.handed] if d_next else [y]) + aside]

        return list(mx.vjp(recompute, [*parameters, rows, *before], [d_rows, *d_next, *d_aside])[1])


def _restarted(states: Sequence[mx.array], documents: mx.array | None, start: int) -> list[mx.array]:
    """Return the states before position `start`: zeros for a row in which a document begins there."""
    if documents is None:
        return list(states)
    same = documents[:, start - 1] == documents[:, start]
    return [mx.where(same.reshape(-1, *[1] * (s.ndim - 1)), s, mx.zeros((), s.dtype)) for s in states]


def _sums(totals: list[mx.array], parts: list[mx.array]) -> list[mx.array]:
    parts = [part.astype(mx.float32) for part in parts]
    return [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
