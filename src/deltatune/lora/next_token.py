"""LoRA for decoding steps: one token of each row.

A GPU multiplies in the dtype of the rows, and an adapter's factors are fp32. Casting them for every token would take
two launches of each adapter, so the cast factors are kept while the next calls are of one token, too, and while the
adapter holds the same arrays. A factor whose numbers change in place, as by `lora_b *= 2`, counts from the next prompt
on.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import mlx.core as mx

from ..machine import backend
from ..ops.tracing.known import Known


class _Cast(NamedTuple):
    """Both factors of an adapter in the dtype of its input rows, kept under its lora_a.

    Attributes:
        origin_of_b: The lora_b that `b` was made from.
        a: [in, r].
        b: [r, out].
    """

    origin_of_b: weakref.ref[mx.array]
    a: mx.array
    b: mx.array


def adapted_token(layer: Any, x: mx.array, known: Known) -> mx.array | None:
    """Return linear(x) + scale * (x A) B for x [..., 1, in]; None on a CPU if the factors have another dtype than x.

    Args:
        layer: A LoRALinear without active dropout.
        x: One token of each row.
        known: Where the cast factors are kept.
    """
    a, b, dtype = layer["lora_a"], layer["lora_b"], x.dtype
    if a.dtype != dtype or b.dtype != dtype:
        cast = known.of(a, _Cast)
        if cast is None or cast.origin_of_b() is not b or cast.a.dtype != dtype:
            if backend.computes_in_fp32():
                return None
            cast = _cast(a, b, dtype, known)
        _, a, b = cast
    return mx.addmm(layer["linear"](x), x @ a, b, alpha=layer.scale)


def forget(known: Known) -> None:
    """Forget the cast factors of all adapters: one of them was called on several tokens, as at a prompt's start."""
    known.forget(_Cast)


def _cast(a: mx.array, b: mx.array, dtype: mx.Dtype, known: Known) -> _Cast:
    cast = _Cast(weakref.ref(b), a.astype(dtype), b.astype(dtype))
    # Arrays that a gradient is taken by, or that a compiled function is given, are others in each call of it.
    known.note(a, cast)
    return cast
