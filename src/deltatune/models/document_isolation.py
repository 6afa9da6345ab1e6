"""Measures whether documents that are packed into one row influence one another in a model.

Any layer of a model may let them, so this is measured before training with packing begins.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..layers import describe
from ..ops.segments import segments

# Largest mean difference of the logits, relative to their mean size. An influence gives tenths. In 16 bits, rounding
# alone can send a token to other experts.
_TOLERANCE = {mx.float32: 1e-3}
_HALF_TOLERANCE = 5e-2


def check_packing(model: nn.Module) -> None:
    """Verify that packed documents get the logits that each of them gets alone.

    The model runs on a dozen tokens: the second document of a row must have the logits that it has alone, whatever the
    first one contains. Call it while the patches are applied.

    Raises:
        UserError: A document influences another, positions are counted from the start of the row, or the model has
            layers that cannot be packed.
    """
    mamba = [str(layer.index) for layer in describe(model) if layer.kind == "mamba"]
    if mamba:
        raise UserError(
            f"packing: layers {', '.join(mamba)} are Mamba layers, whose state cannot restart between documents. "
            "Train this model without packing."
        )
    first, other, second = mx.array([[1, 2, 3, 4, 5]]), mx.array([[6, 5, 4, 3, 2]]), mx.array([[2, 4, 6, 1, 3, 5, 7]])
    owner = mx.array([[0] * 5 + [1] * 7])
    alone = _logits(model, second, mx.zeros(second.shape, mx.int32))
    tolerance = _TOLERANCE.get(alone.dtype, _HALF_TOLERANCE)
    for before in (first, other):
        packed = _logits(model, mx.concatenate([before, second], axis=1), owner)[:, 5:]
        difference = _size(packed - alone) / _size(alone)
        if not difference < tolerance:
            raise UserError(
                f"packing: a document that follows another in its row gets logits {difference:.1%} off those that it "
                f"has alone (at most {tolerance:.1%} is rounding), so a layer of {type(model).__module__} sees across "
                "documents or counts positions from the row's start. Train this model without packing."
            )


def _logits(model: nn.Module, tokens: mx.array, owner: mx.array) -> mx.array:
    with segments(owner):
        output = model(tokens)
    return output if isinstance(output, mx.array) else output.logits


def _size(array: mx.array) -> float:
    return float(mx.abs(array.astype(mx.float32)).mean())
