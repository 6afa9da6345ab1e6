"""What upstream does without deltatune's patches: refuse a gradient, or loop over tokens. Else nothing was proven."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..demo.assets import MODEL
from ..errors import first_line
from ..layers import describe
from ..models.load import load_model
from ..patches import patched
from .outcome import FAILED, PASSED, Check, Outcome

_SHORT, _LONG = 64, 192
# Operations that one more token costs a gated-delta layer: upstream's loop takes about 40 of them, ours under one.
_LOOPS, _DOES_NOT = 20, 5


def operations(model: nn.Module, length: int) -> int:
    """Operations in the graph of a loss and its gradients; nothing is computed."""
    rows = mx.random.randint(7, 320, (2, length), key=mx.random.key(0))

    def loss(rows: mx.array) -> mx.array:
        logits = model(rows)[:, :-1].astype(mx.float32)
        return nn.losses.cross_entropy(logits, rows[:, 1:]).sum()

    value, tree = nn.value_and_grad(model, loss)(rows)
    arrays: Any = tree_flatten(tree)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), loss=value, **{f"g{i}": array for i, (_, array) in enumerate(arrays)})
        return sum("label =" in line and "rectangle" in line for line in file.read_text().split(";"))


def growth(model: nn.Module) -> float:
    """Operations that one more token costs each gated-delta layer of `model`."""
    layers = sum(layer.kind == "delta" for layer in describe(model))
    return (operations(model, _LONG) - operations(model, _SHORT)) / (_LONG - _SHORT) / layers


def control(training: bool) -> Outcome:
    """The demo's model without and with the patches, in training mode or with `model.train()` forgotten."""
    model, _ = load_model(MODEL)
    model.train(training)
    try:
        alone = growth(model)
        words = f"upstream alone: {alone:.1f} operations a token and layer"
        shown = alone > _LOOPS
    except (RuntimeError, ValueError) as error:
        words, shown = f"upstream alone refuses: {first_line(error)[:160]}", True
    with patched(model):
        ours = growth(model)
    words += f"; patched: {ours:.1f} operations"
    return Outcome(PASSED if shown and ours < _DOES_NOT else FAILED, words)


def checks(quick: bool) -> Iterator[Check]:
    """The same whether `quick` or not."""
    yield Check("control: training without the patches", partial(control, True))
    yield Check("control: train() forgotten", partial(control, False))
