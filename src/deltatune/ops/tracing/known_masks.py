"""Remembers the rules of boolean attention masks, so that attention takes the rule and never reads the mask.

MLX computes an array when it is read. So a mask with a rule that is known here takes no memory, unless code other than
deltatune's reads it, and then it is right there too.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from . import trace


class MaskRule(NamedTuple):
    """The positions that a causal mask of as many queries as keys hides beside later ones.

    Attributes:
        window: How many keys a query sees at most, itself and those before it; None for all.
        segments: The documents of a packed batch [B, T], of which a query sees its own alone; None for rows of one.
        read: Whether the model asked for an array, which its layers then read themselves.
    """

    window: int | None
    segments: mx.array | None
    read: bool = False


def remember(mask: mx.array, rule: MaskRule) -> mx.array:
    """Remember the rule of `mask` for as long as the array lives, and return the mask."""
    trace.current().known.note(mask, rule)
    return mask


def rule_of(mask: mx.array) -> MaskRule | None:
    """Return the rule that was remembered for this very array; None if there is none."""
    return trace.current().known.of(mask, MaskRule)
