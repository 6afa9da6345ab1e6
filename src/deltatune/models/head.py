"""Splits a model into what makes hidden states and what makes logits of them, so that a loss can chunk the second.

Nothing is known of any family: the part of the model that holds the layers is swapped for a stand-in while the model
runs. With it answering as the real part does, the model yields the hidden states; with it answering given hidden
states, the rest of the model is the head, its multipliers, soft caps and tied embedding included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layers import layer_paths

Backbone = Callable[..., mx.array]


class Split(NamedTuple):
    """`head(backbone(tokens))` equals the logits of `model(tokens)`; or both are None, and `reason` says why."""

    backbone: Backbone | None
    head: nn.Module | None
    reason: str | None = None


class _StandIn:
    """Takes a module's place: calls go to `answer`, every other access to the module, noted in `asked`."""

    def __init__(self, module: Any, answer: Callable[..., Any]) -> None:
        self._module = module
        self._answer = answer
        self.asked: set[str] = set()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.asked.add("__call__")
        return self._answer(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._module, name)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._module[name]


@contextmanager
def _in_place_of(parent: nn.Module, name: str, stand_in: _StandIn) -> Iterator[None]:
    module = parent[name]
    dict.__setitem__(parent, name, stand_in)
    try:
        yield
    finally:
        dict.__setitem__(parent, name, module)


class Head(nn.Module):
    """The part of a model behind its layers: hidden states [..., D] -> logits [..., vocab].

    Its children are the very modules of the model that it uses, so their parameters are the model's.
    """

    def __init__(self, model: nn.Module, parent: nn.Module, name: str, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        # In a tuple the model is no child of the head, and only what the head uses counts as its parameters.
        self._model = (model, parent, name)
        self.parts = parts

    def __call__(self, hidden: mx.array) -> mx.array:
        model, parent, name = self._model
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        stand_in = _StandIn(parent[name], lambda *_, **__: rows)
        with _in_place_of(parent, name, stand_in):
            logits = _logits(model(mx.zeros(rows.shape[:2], mx.int32)))
        return logits.reshape(*hidden.shape[:-1], -1)


def split_head(model: nn.Module, *, compare: bool = True) -> Split:
    """Split `model`, and verify on two tokens that the halves give its logits, bit for bit.

    Call it after adapters are in place: a module replaced later is not followed. The backbone passes further keyword
    arguments on to the model. A model that cannot be split gives Split(None, None, reason). Without `compare` nothing
    is computed, and lazily loaded weights stay where they are.
    """
    chain = _ancestors(model)
    tokens = mx.array([[1, 2]])
    reason = "no part of it that holds the layers is called once and gives hidden states [B, T, D]"
    for parent, name in chain:
        backbone = _backbone(model, parent, name)
        hidden, logits = backbone(tokens, both=True)
        if hidden is None or hidden is logits:
            continue
        parts = _parts(model, chain[: chain.index((parent, name)) + 1], hidden)
        if isinstance(parts, str):
            reason = parts
            continue
        head = Head(model, parent, name, parts)
        if not compare or mx.array_equal(head(hidden), logits, equal_nan=True):
            return Split(backbone, head)
        reason = f"what follows `{name}` gives other logits when it is run alone"
    return Split(
        None, None, f"{type(model).__module__}.{type(model).__name__} cannot be split before its head: {reason}."
    )


def _ancestors(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(parent, name) of every module on the way from `model` down to its layers."""
    chain, parent = [], model
    for name in layer_paths(model)[0].split("."):
        child = parent[name] if isinstance(parent, nn.Module) and name in parent else None
        if not isinstance(child, nn.Module):
            break
        chain.append((parent, name))
        parent = child
    return chain


def _logits(output: Any) -> mx.array:
    return output if isinstance(output, mx.array) else output.logits


def _backbone(model: nn.Module, parent: nn.Module, name: str) -> Callable[..., Any]:
    def backbone(tokens: mx.array, both: bool = False, **keywords: Any) -> Any:
        found: list[Any] = []

        def answer(*arguments: Any, **options: Any) -> Any:
            found.append(trunk(*arguments, **options))
            return found[-1]

        trunk = parent[name]
        with _in_place_of(parent, name, _StandIn(trunk, answer)):
            logits = _logits(model(tokens, **keywords))
        once = len(found) == 1 and isinstance(found[0], mx.array) and found[0].ndim == 3
        hidden = found[0] if once else None
        return (hidden, logits) if both else hidden

    return backbone


def _parts(model: nn.Module, chain: list[tuple[nn.Module, str]], hidden: mx.array) -> dict[str, nn.Module] | str:
    """The modules that the head uses, by name; or why its parameters cannot be told."""
    parent, name = chain[-1]
    trunk = parent[name]
    beside = {
        f"{key}_{depth}": (owner, key, child)
        for depth, (owner, skipped) in enumerate(chain)
        for key, child in owner.items()
        if key != skipped and isinstance(child, nn.Module)
    }
    stands = {label: _StandIn(child, child) for label, (_, _, child) in beside.items()}
    stand_in = _StandIn(trunk, lambda *_, **__: hidden)
    for owner, _ in chain:
        loose = [key for key, value in owner.items() if isinstance(value, (mx.array, list, dict)) and key[0] != "_"]
        loose = [key for key in loose if not isinstance(owner[key], nn.Module)]
        if loose:
            return f"`{loose[0]}` stands beside the layers, and may or may not belong to the head"
    with _in_place_of(parent, name, stand_in):
        for label, (owner, key, _) in beside.items():
            dict.__setitem__(owner, key, stands[label])
        try:
            model(mx.zeros(hidden.shape[:2], mx.int32))
        finally:
            for owner, key, child in beside.values():
                dict.__setitem__(owner, key, child)
    parts = {label: child for label, (_, _, child) in beside.items() if stands[label].asked}
    for asked in stand_in.asked:
        value = getattr(trunk, asked)
        if isinstance(value, nn.Module):
            parts[asked] = value
        elif isinstance(value, (mx.array, list, dict)):
            return f"its head reads `{asked}` of `{name}`"
    return parts
