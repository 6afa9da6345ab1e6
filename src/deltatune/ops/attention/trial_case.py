"""The cases on which an implementation of attention is tried before its first use for a class of calls, and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..trial.case import Case
from .naive import attention_naive
from .tolerances import fused_bound

Implementation = Callable[..., mx.array]
NAMES = ("y", "dq", "dk", "dv", "dsinks")
# The length is more than two tiles of any kernel, the last one incomplete. Window and segments end inside tiles.
_BATCH, _LENGTH, _KEY_HEADS, _WINDOW, _SEGMENT = 1, 300, 2, 90, 130
# The timed runs have longer rows, of which a GPU has some milliseconds of work.
_TIMED_LENGTH, _TIMED_KEY_HEADS = 1024, 4


@dataclass(frozen=True)
class KernelShape:
    """A class of calls that run the same kernels, whatever their batch and length. They share a verdict.

    Attributes:
        machine: The machine that the kernels are for, one of fused_op.MACHINES.
        size: The size of a query head and a key head.
        value_size: The size of a value head.
        dtype: The name of the dtype of q, k and v.
        grouped: Whether several query heads read one key head.
        causal: Whether a query sees no later key.
        windowed: Whether a window hides keys.
        segmented: Whether the call has segments.
        with_sinks: Whether the call has sinks.
    """

    machine: str
    size: int
    value_size: int
    dtype: str
    grouped: bool
    causal: bool
    windowed: bool
    segmented: bool
    with_sinks: bool

    def __str__(self) -> str:
        options = [name for name in ("grouped", "causal", "windowed", "segmented", "with_sinks") if getattr(self, name)]
        options = [option.replace("_", " ") for option in options]
        machine = [self.machine] if self.machine else []
        return ", ".join([*machine, self.dtype, f"heads of {self.size} x {self.value_size}", *options])


def trial_case(shape: KernelShape) -> Case[Implementation]:
    """Return the case of a class of calls, forward and backward; its truth comes from `naive` in fp32 on the CPU."""
    return _case(shape, _LENGTH, _KEY_HEADS)


def timed_case(shape: KernelShape) -> Case[Implementation]:
    """Return the case on which implementations are timed."""
    return _case(shape, _TIMED_LENGTH, _TIMED_KEY_HEADS)


def _case(shape: KernelShape, length: int, key_heads: int) -> Case[Implementation]:
    arrays, dy, options = _drawn(shape, length, key_heads)

    def truth() -> list[mx.array]:
        # On the CPU, because a GPU may multiply fp32 matrices in TF32.
        with mx.stream(mx.cpu):
            wide = [x.astype(mx.float32) for x in (*arrays, dy)]
            results = differentiated(attention_naive, wide[:-1], wide[-1], options)
            mx.eval(results)
        return results

    return Case(
        name=str(shape),
        results=NAMES[: 1 + len(arrays)],
        call=lambda function: differentiated(function, arrays, dy, options),
        truth=truth,
        bound=fused_bound(shape.dtype),
        reference="naive",
        like=[*arrays, dy],
    )


def differentiated(function: Implementation, arrays: Sequence[mx.array], dy: mx.array, options: dict) -> list[mx.array]:
    """Return y and the gradients of `arrays`, not computed yet.

    Args:
        function: Called as `attention` is.
        arrays: q, k, v and, where there are any, the sinks.
        dy: The gradient of y.
        options: The other arguments.
    """

    def call(*arrays: mx.array) -> list[mx.array]:
        sinks = arrays[3] if len(arrays) > 3 else None
        return [function(*arrays[:3], sinks=sinks, **options)]

    outputs, gradients = mx.vjp(call, list(arrays), [dy])
    return [*outputs, *gradients]


def _drawn(shape: KernelShape, length: int, key_heads: int) -> tuple[list[mx.array], mx.array, dict]:
    """Return q, k, v and, for a class with sinks, the sinks; dy; and the options of the call.

    NumPy draws them, because MLX's random state belongs to the training.
    """
    draw = np.random.default_rng(0)
    heads = key_heads * (2 if shape.grouped else 1)
    sizes = [(heads, shape.size), (key_heads, shape.size), (key_heads, shape.value_size), (heads, shape.value_size)]
    drawn = [draw.normal(size=(_BATCH, count, length, size)).astype(np.float32) for count, size in sizes]
    *arrays, dy = (mx.array(x).astype(getattr(mx, shape.dtype)) for x in drawn)
    options: dict = {"scale": shape.size**-0.5, "causal": shape.causal}
    if shape.windowed:
        options["window"] = _WINDOW
    if shape.segmented:
        options["segments"] = mx.array(np.arange(length, dtype=np.int32)[None] // _SEGMENT)
    if shape.with_sinks:
        arrays.append(mx.array(draw.normal(size=heads).astype(np.float32)))
    return arrays, dy, options
