"""Splits a model into a backbone (tokens to hidden states) and a head (hidden states to logits).

The loss over a large vocabulary needs the two apart, so that it can compute logits in chunks; so do the scores of long
texts. No model family is known here by name. While the model runs, a stand-in takes the place of the trunk, the module
that holds the layers:

- The backbone uses a stand-in that calls the trunk and records its output, the hidden states.
- The head uses a stand-in that returns given hidden states, so that only the rest of the model computes: output
  multipliers, soft caps and tied embeddings are included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..errors import NotFiniteError
from ..layers import layer_paths, logits_of

Backbone = Callable[..., mx.array]


class Split(NamedTuple):
    """The two parts of a model, or the reason, a sentence, why it cannot be split. The backbone maps tokens [B, T] to
    hidden states [B, T, D], and the head those to logits, so that head(backbone(tokens)) equals model(tokens).
    """

    backbone: Backbone | None
    head: nn.Module | None
    reason: str | None = None


class _StandIn:
    """Takes the place of a module in a model. `used` collects the names that the rest of the model reads from it.

    A call of the stand-in calls `answer`; every other access goes to the module itself.
    """

    def __init__(self, module: Any, answer: Callable[..., Any]) -> None:
        self._module = module
        self._answer = answer
        self.used: set[str] = set()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.used.add("__call__")
        return self._answer(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return getattr(self._module, name)

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self._module[name]


@contextmanager
def _in_place_of(parent: nn.Module, name: str, stand_in: _StandIn) -> Iterator[None]:
    """Put `stand_in` in the place of the child `name` of `parent` within a `with` block."""
    module = parent[name]
    dict.__setitem__(parent, name, stand_in)
    try:
        yield
    finally:
        dict.__setitem__(parent, name, module)


class Head(nn.Module):
    """The part of a model behind its layers: hidden states [..., D] -> logits [..., vocabulary].

    `parts` are modules of the model itself, not copies, so their parameters are the model's. The trunk is
    `parent[name]`.
    """

    def __init__(self, model: nn.Module, parent: nn.Module, name: str, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        # MLX does not look for children in a tuple, so only `parts` count as the head's parameters.
        self._model = (model, parent, name)
        self.parts = parts

    def __call__(self, hidden: mx.array) -> mx.array:
        model, parent, name = self._model
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        stand_in = _StandIn(parent[name], lambda *_, **__: rows)
        with _in_place_of(parent, name, stand_in):
            logits = logits_of(model, mx.zeros(rows.shape[:2], mx.int32))
        return logits.reshape(*hidden.shape[:-1], -1)


def split_head(model: nn.Module, *, compare: bool = True) -> Split:
    """Split a language model and verify on two tokens that its parts give the model's logits, bit for bit.

    The model takes tokens [B, T] and returns logits, as an array or as `output.logits`; the backbone passes further
    keyword arguments on. Call it after adapters are added: modules that are replaced later are not noticed. Without
    `compare` nothing is computed; the result is Split(None, None, reason) for a model that cannot be split.
    """
    chain = _ancestors(model)
    tokens = mx.array([[1, 2]])
    reason = "no module that holds the layers is called exactly once and returns hidden states [B, T, D]"
    for depth, (parent, name) in enumerate(chain, 1):
        backbone = _backbone(model, parent, name)
        hidden, logits = backbone(tokens, both=True)
        if hidden is None or hidden is logits:
            continue
        parts = _parts(model, chain[:depth], hidden)
        if isinstance(parts, str):
            reason = parts
            continue
        head = Head(model, parent, name, parts)
        if not compare or mx.array_equal(head(hidden), logits, equal_nan=True):
            return Split(backbone, head)
        reason = f"the part behind `{name}` gives other logits when it runs alone"
    return Split(
        None, None, f"{type(model).__module__}.{type(model).__name__} cannot be split before its head: {reason}."
    )


def _ancestors(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(parent, name) of every module on the path from `model` down to its layers."""
    chain = []
    parent = model
    for name in layer_paths(model)[0].split("."):
        child = parent[name] if isinstance(parent, nn.Module) and name in parent else None
        if not isinstance(child, nn.Module):
            break
        chain.append((parent, name))
        parent = child
    return chain


def _backbone(model: nn.Module, parent: nn.Module, name: str) -> Callable[..., Any]:
    """A function that runs `model` and returns the output of its trunk, with `both` the logits as well.

    The output is None where the trunk is not called exactly once or does not return an array [B, T, D].
    """

    def backbone(tokens: mx.array, both: bool = False, **keywords: Any) -> Any:
        outputs: list[Any] = []

        def answer(*arguments: Any, **options: Any) -> Any:
            outputs.append(trunk(*arguments, **options))
            return outputs[-1]

        trunk = parent[name]
        with _in_place_of(parent, name, _StandIn(trunk, answer)):
            logits = logits_of(model, tokens, **keywords)
        usable = len(outputs) == 1 and isinstance(outputs[0], mx.array) and outputs[0].ndim == 3
        hidden = outputs[0] if usable else None
        return (hidden, logits) if both else hidden

    return backbone


def _parts(model: nn.Module, chain: list[tuple[nn.Module, str]], hidden: mx.array) -> dict[str, nn.Module] | str:
    """The modules that the head uses, by name, or a reason why they cannot be determined.

    The model runs once more with stand-ins for the trunk and for every module beside it, which note their use.
    """
    parent, name = chain[-1]
    trunk = parent[name]
    beside = {
        f"{key}_{depth}": (owner, key, child)
        for depth, (owner, skipped) in enumerate(chain)
        for key, child in owner.items()
        if key != skipped and isinstance(child, nn.Module)
    }
    stand_ins = {label: _StandIn(child, child) for label, (_, _, child) in beside.items()}
    trunk_stand_in = _StandIn(trunk, lambda *_, **__: hidden)
    for owner, _ in chain:
        arrays = [key for key, value in owner.items() if isinstance(value, (mx.array, list, dict)) and key[0] != "_"]
        arrays = [key for key in arrays if not isinstance(owner[key], nn.Module)]
        if arrays:
            return f"`{arrays[0]}` is not a module, so whether the head reads it cannot be determined"
    with _in_place_of(parent, name, trunk_stand_in):
        for label, (owner, key, _) in beside.items():
            dict.__setitem__(owner, key, stand_ins[label])
        try:
            logits_of(model, mx.zeros(hidden.shape[:2], mx.int32))
        finally:
            for owner, key, child in beside.values():
                dict.__setitem__(owner, key, child)
    parts = {label: child for label, (_, _, child) in beside.items() if stand_ins[label].used}
    for attribute in trunk_stand_in.used:
        value = getattr(trunk, attribute)
        if isinstance(value, nn.Module):
            parts[attribute] = value
        elif isinstance(value, (mx.array, list, dict)):
            return f"its head reads `{attribute}` of `{name}`, which is not a module"
    return parts


# Logits are computed of so many tokens at a time: over a large vocabulary, those of a whole text would take gigabytes.
PIECE = 256


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens is the likeliest."""

    total: float
    greedy: bool


def scored(model: nn.Module, split: Split, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Likelihood]:
    """Score the last `counts` tokens of each row of tokens; logits are computed for those alone where the model is
    split.
    """
    width = max(map(len, rows)) - 1
    tokens = mx.array([[*row[:-1], *[0] * (width + 1 - len(row))] for row in rows], mx.int32)
    outputs = before_head(model, split, tokens)
    scores = []
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        total = 0.0
        greedy = True
        for start in range(len(row) - 1 - count, len(row) - 1, PIECE):
            end = min(start + PIECE, len(row) - 1)
            pieces = of_piece(split, outputs[number, start:end], mx.array(list(row[start + 1 : end + 1]), mx.int32))
            mx.eval(pieces)
            total = total + float(pieces[0])
            greedy = greedy and bool(pieces[1].item())
        if not math.isfinite(total):
            raise NotFiniteError(row)
        scores.append(Likelihood(total, greedy))
    return scores


def before_head(model: nn.Module, split: Split, tokens: mx.array) -> mx.array:
    """Return the hidden states of tokens [B, T] behind the layers, or the logits of a model that cannot be split."""
    return logits_of(model, tokens) if split.backbone is None else split.backbone(tokens)


def of_piece(split: Split, outputs: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return the log-likelihood of targets [T], and whether all are the likeliest, from outputs of before_head()."""
    logits = (outputs if split.head is None else split.head(outputs)).astype(mx.float32)
    of_targets = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
    return of_targets.sum(), (logits.argmax(axis=-1) == targets).all()
