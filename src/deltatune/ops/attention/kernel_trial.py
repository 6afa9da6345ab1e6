"""Checks once per machine whether a fast implementation of attention computes what `naive` computes, and times it.

choice.py asks `of` before it uses the implementation for a class of shapes for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from ...machine import backend
from ..kernels.cubin import built_side_by_side
from ..trial import verdicts
from ..trial.measure import relative_error
from ..trial.timing import Run
from ..trial.verdicts import Verdict
from .naive import attention_naive
from .tolerances import fused_bound

Implementation = Callable[..., mx.array]
NAMES = ("y", "dq", "dk", "dv", "dsinks")
# The check's length is more than two tiles of any kernel, the last one incomplete. The window and the segments end
# inside tiles.
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


def of(name: str, function: Implementation, shape: KernelShape) -> Verdict:
    """Return the verdict on an implementation for a class of calls: the stored one, or else that of a check now.

    The check has arrays of its own and evaluates them at once, so it may run while something else is being traced.

    Args:
        name: The name of the implementation.
        function: Called as `attention` is, on the check's small arrays.
        shape: The class of calls.
    """
    return verdicts.of(verdicts.stored("attention", name), shape, lambda: measure(name, function, shape))


def again(name: str, function: Implementation, shape: KernelShape) -> Verdict:
    """Check now, whatever verdict is stored, and store the new one. Arguments and result are those of `of`."""
    return verdicts.again(verdicts.stored("attention", name), shape, lambda: measure(name, function, shape))


def measure(name: str, function: Implementation, shape: KernelShape) -> Verdict:
    """Compare `function` with `naive` in fp32 on the CPU, forward and backward."""
    blank = Verdict(name, str(shape), fused_bound(shape.dtype), reference="naive")
    arrays, dy, options = _case(shape)
    # On the CPU, because a GPU may multiply fp32 matrices in TF32.
    with mx.stream(mx.cpu):
        wide = [x.astype(mx.float32) for x in (*arrays, dy)]
        expected = _differentiate(attention_naive, wide[:-1], wide[-1], options)
    try:
        _build(function, arrays, dy, options)
        results = _differentiate(function, arrays, dy, options)
    except (RuntimeError, ValueError) as error:
        return replace(blank, problem=f"{type(error).__name__}: {error}")
    pairs = zip(NAMES, results, expected, strict=False)
    return replace(blank, errors={name: relative_error(found, exact) for name, found, exact in pairs})


def runs(given: Mapping[str, tuple[Implementation, KernelShape]]) -> dict[str, Run]:
    """Return what is timed of each implementation: a forward and a backward pass, on the same arrays for all."""
    arrays, dy, options = _case(next(iter(given.values()))[1], _TIMED_LENGTH, _TIMED_KEY_HEADS)
    mx.eval(arrays, dy)

    def run(function: Implementation) -> list[mx.array]:
        outputs, gradients = _traced(function, arrays, dy, options)
        return [*outputs, *gradients]

    return {name: partial(run, function) for name, (function, _) in given.items()}


def _case(
    shape: KernelShape, length: int = _LENGTH, key_heads: int = _KEY_HEADS
) -> tuple[list[mx.array], mx.array, dict]:
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


def build(function: Implementation, shape: KernelShape) -> None:
    """Build the kernels of the forward and the backward pass side by side, where an NVIDIA GPU has them to build."""
    _build(function, *_case(shape))


def _build(function: Implementation, arrays: list[mx.array], dy: mx.array, options: dict) -> None:
    if backend.device() == "cuda":
        with built_side_by_side():
            _traced(function, arrays, dy, options)


def _traced(function: Implementation, arrays: list[mx.array], dy: mx.array, options: dict) -> tuple[list, list]:
    """Return y and the gradients of `arrays`, not computed yet."""

    def call(*given: mx.array) -> list[mx.array]:
        sinks = given[3] if len(given) > 3 else None
        return [function(*given[:3], sinks=sinks, **options)]

    return mx.vjp(call, arrays, [dy])


def _differentiate(function: Implementation, arrays: list[mx.array], dy: mx.array, options: dict) -> list[np.ndarray]:
    """Return y and the gradients of `arrays`, in fp32."""
    # The results get the memory of these arrays, so that an element that no kernel writes is NaN.
    mx.eval([mx.full(x.shape, np.nan, x.dtype) for x in (*arrays, dy)])
    outputs, gradients = _traced(function, arrays, dy, options)
    wide = [x.astype(mx.float32) for x in (*outputs, *gradients)]
    mx.eval(wide)
    return [np.array(x) for x in wide]
