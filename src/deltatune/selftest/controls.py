"""Controls of the self-test: without deltatune's patches, upstream must refuse a gradient or loop over tokens.

If upstream did neither, a passed check of the patched model would say nothing about the patches.
"""

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
from ..layers import describe, logits_of
from ..models.load import load_model
from ..patches import patched
from .outcome import FAILED, PASSED, Check, Outcome

_SHORT, _LONG = 64, 192
# Operations that one more token adds per gated-delta layer: about 40 in upstream's loop, under 1 in deltatune's.
_FEWEST_OF_A_LOOP, _MOST_OF_DELTATUNE = 20, 5


def operations(model: nn.Module, length: int) -> int:
    """How many operations the graph of a loss and its gradients has on rows of `length` tokens; nothing is computed."""
    rows = mx.random.randint(7, 320, (2, length), key=mx.random.key(0))

    def loss(rows: mx.array) -> mx.array:
        logits = logits_of(model, rows)[:, :-1].astype(mx.float32)
        return nn.losses.cross_entropy(logits, rows[:, 1:]).sum()

    value, tree = nn.value_and_grad(model, loss)(rows)
    arrays: Any = tree_flatten(tree)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), loss=value, **{f"g{i}": array for i, (_, array) in enumerate(arrays)})
        return sum("label =" in line and "rectangle" in line for line in file.read_text().split(";"))


def growth(model: nn.Module) -> float:
    """How many operations one more token adds, per gated-delta layer of `model`."""
    layers = sum(layer.kind == "delta" for layer in describe(model))
    return (operations(model, _LONG) - operations(model, _SHORT)) / (_LONG - _SHORT) / layers


def control(training: bool) -> Outcome:
    """Compare the demo's model without and with the patches, in training mode or after a forgotten `model.train()`."""
    model, _ = load_model(MODEL)
    model.train(training)
    try:
        alone = growth(model)
        words = f"upstream alone: {alone:.1f} operations a token and layer"
        upstream_fails = alone > _FEWEST_OF_A_LOOP
    except (RuntimeError, ValueError) as error:
        words, upstream_fails = f"upstream alone refuses: {first_line(error)[:160]}", True
    with patched(model):
        ours = growth(model)
    words += f"; patched: {ours:.1f} operations"
    return Outcome(PASSED if upstream_fails and ours < _MOST_OF_DELTATUNE else FAILED, words)


def checks(quick: bool) -> Iterator[Check]:
    """The same checks whether `quick` or not."""
    yield Check("control: training without the patches", partial(control, True))
    yield Check("control: train() forgotten", partial(control, False))
