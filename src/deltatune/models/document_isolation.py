"""Measures whether documents that are packed into one row influence one another in a model.

Any layer of a model may let them, so this is measured before training with packing begins.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError, first_line
from ..layers import describe, logits_of
from ..ops.segments import segments
from .drawn_weights import drawn_weights

# Tokens of the first and of the second document of a row, and what a row is longer than a window by.
_FIRST, _SECOND = 16, 32
# The largest change that another document in the row may make in the logits of a token, relative to their mean size.
# Between rows that differ in nothing else, the products of a document are the same: the rest is routing of experts.
_INFLUENCE = 1e-3
# The same for the token in the middle, which routing leaves as it is: nothing on a CPU, and rounding at most elsewhere.
_MIDDLE = 1e-5
# The same for another place in the row, in the middle of all tokens. Rotary positions round differently there, in TF32
# to 2**-11, and a token in a hundred may go to another expert; a table of positions gives tenths.
_PLACE = 2e-2
# Names of the sizes from which on layers mask, select or cut rows in another way than on short rows.
_SIZES = ("window", "chunk_size", "topk")


def check_packing(model: nn.Module, longest: int) -> None:
    """Verify that packed documents get the logits that each of them gets alone.

    The model runs with drawn weights in fp32, so that neither its own weights nor its dtype can hide an influence, on
    rows that are longer than the windows of its layers. The second document of a row must have the same logits whatever
    the first one contains, and those that it has at the start of a row. Call it while the patches are applied.

    Args:
        model: The model. It holds the same arrays afterwards.
        longest: The length of the longest row that will be trained, in tokens.

    Raises:
        UserError: A document influences another, positions are counted from the start of the row, or the model has
            layers that cannot be packed.
    """
    layers = describe(model)
    mamba = [str(layer.index) for layer in layers if layer.kind == "mamba"]
    if mamba:
        raise UserError(
            f"packing: layers {', '.join(mamba)} are Mamba layers, whose state cannot restart between documents. "
            "Train this model without packing."
        )
    first, second = _lengths(model, longest)
    influences = []
    with drawn_weights(model, [layer.module for layer in layers]):
        # Rounding alone sends a token to other experts once in a thousand models: a leak is there in every draw.
        for draw in range(2):
            try:
                influence, middle, place = _measure(model, first, second, draw)
            except ValueError as error:
                raise UserError(
                    f"packing: {type(model).__module__} cannot compute a packed row, since it reads its mask in "
                    f"another shape ({first_line(error)}). Train this model without packing."
                ) from error
            if influence < _INFLUENCE and middle < _MIDDLE and place < _PLACE:
                return
            influences.append(max(influence, place))
    # What is not finite is no number below a limit either.
    raise UserError(
        f"packing: a document that follows another in its row gets logits {min(influences):.1%} off those that it has "
        f"alone (measured in fp32 with drawn weights, on rows of {first + second:,} tokens), so a layer of "
        f"{type(model).__module__} sees across documents or counts positions from the row's start. Train this model "
        "without packing."
    )


def _lengths(model: nn.Module, longest: int) -> tuple[int, int]:
    """Return the lengths of the two documents: longer than every window together, as far as training has such rows."""
    owners = [owner for module in model.modules() for owner in (module, *vars(module).values())]
    sizes = [
        size
        for owner in owners
        if hasattr(owner, "__dict__")
        for name, size in vars(owner).items()
        if type(size) is int and any(word in name for word in _SIZES)
    ]
    shortest = _FIRST + _SECOND
    needed = max([shortest, *(min(size + _FIRST, longest) for size in sizes if size < longest)])
    return _FIRST, needed - _FIRST


def _measure(model: nn.Module, first: int, second: int, draw: int) -> tuple[float, float, float]:
    """Return how far another first document, and another place in the row, change the logits of the second document.

    The first figure is that of the token that another document changes most, the second that of the token in the
    middle, the third that of the token in the middle at another place.
    """
    keys = mx.random.split(mx.random.key(draw), 3)
    one, other, tested = (
        mx.random.randint(1, 60, (1, length), key=key) for length, key in zip((first, first, second), keys, strict=True)
    )
    rows = mx.concatenate([mx.concatenate(pair, axis=1) for pair in ([one, tested], [other, tested], [tested, one])])
    followed, leading = [0] * first + [1] * second, [0] * second + [1] * first
    with segments(mx.array([followed, followed, leading], mx.int32)):
        logits = logits_of(model, rows).astype(mx.float32)
    after_one, after_other, alone = logits[0, first:], logits[1, first:], logits[2, :second]
    size = mx.abs(alone).mean()
    influence = mx.sort(mx.abs(after_one - after_other).mean(axis=1) / size)
    place = mx.sort(mx.abs(after_one - alone).mean(axis=1) / size)
    return float(influence.max()), float(influence[second // 2]), float(place[second // 2])
