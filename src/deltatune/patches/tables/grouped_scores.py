"""Lets attention that groups its query heads by key head read the mask of a packed batch.

Gemma 2 computes its scores itself, as [B, key heads, query heads of each, T, T]. A mask [T, T] fits them, and one that
differs between the rows of a batch, [B, 1, T, T], fits another axis than that of the rows, or none.

Versions read: mlx-lm 0.32.2; mlx-vlm 0.7.0, 0.7.10.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..patch_record import PACKING, Function, Patch
from ..small_cases import causal, layer_input, same_layer


def _with_mask_of_rows(upstream: Function) -> Function:
    """Gemma 2's attention with a mask that may differ between rows."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
        if self.repeats > 1 and isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mask[:, :, None]
        return upstream(self, x, mask, cache)

    return __call__


_RECORD: dict[str, Any] = {
    "name": "Attention.__call__",
    "reason": "the mask of packed documents belongs to rows, and not to groups of heads",
    "without": "Gemma 2 then cannot train on packed documents in batches of several rows.",
    "needed_for": (PACKING,),
    "replacement": _with_mask_of_rows,
    "check": same_layer(layer_input, causal),
}

PATCHES = (
    Patch(**_RECORD, module="mlx_lm.models.gemma2"),
    Patch(**_RECORD, module="mlx_vlm.models.gemma2.language"),
)
