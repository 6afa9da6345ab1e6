"""Whether the fused kernels compute on this machine what the definition says: measured once, and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..gated_delta.machine_trial import Verdict, path_of, read, write
from ..trial import relative_error
from .naive import attention_naive
from .tolerances import fused_bound

logger = logging.getLogger(__name__)

Implementation = Callable[..., mx.array]
NAMES = ("y", "dq", "dk", "dv", "dsinks")
# More than two tiles of any kernel, the last one ragged; a window and segments that end inside of tiles.
_BATCH, _LENGTH, _KEY_HEADS, _WINDOW, _SEGMENT = 1, 300, 2, 90, 130


@dataclass(frozen=True)
class KernelShape:
    """What decides which kernels a call runs. `machine`: whose kernels they are."""

    machine: str
    size: int
    value_size: int
    dtype: str
    grouped: bool
    causal: bool
    windowed: bool
    segmented: bool
    sunk: bool

    def __str__(self) -> str:
        options = [name for name in ("grouped", "causal", "windowed", "segmented", "sunk") if getattr(self, name)]
        return ", ".join([self.machine, self.dtype, f"heads of {self.size} x {self.value_size}", *options])


_known: dict[KernelShape, Verdict] = {}


def of(function: Implementation, shape: KernelShape) -> Verdict:
    """The verdict on `function` for calls of this class: as found before on this machine, else measured now.

    Measured with arrays of its own, evaluated at once: safe while something else is being traced.
    """
    if shape not in _known:
        _known[shape] = read(path_of("attention", shape)) or again(function, shape)
    return _known[shape]


def again(function: Implementation, shape: KernelShape) -> Verdict:
    """The same, measured now whatever was found before."""
    found = _known[shape] = measure(function, shape)
    # What stopped a trial may be gone the next time.
    if found.problem is None:
        write(path_of("attention", shape), found)
    return found


def forget() -> None:
    """Forget the verdicts of this process; those in the cache folder stay."""
    _known.clear()


def measure(function: Implementation, shape: KernelShape) -> Verdict:
    """Compare `function` with the definition, in fp32 on the CPU: forward and backward."""
    blank = Verdict("fused attention", str(shape), fused_bound(shape.dtype), reference="naive")
    arrays, dy, options = _case(shape)
    # The CPU's products are fp32; a GPU's may be TF32.
    with mx.stream(mx.cpu):
        wide = [x.astype(mx.float32) for x in (*arrays, dy)]
        expected = _differentiate(attention_naive, wide[:-1], wide[-1], options)
    try:
        results = _differentiate(function, arrays, dy, options)
    except (RuntimeError, ValueError) as error:
        return replace(blank, problem=f"{type(error).__name__}: {error}")
    pairs = zip(NAMES, results, expected, strict=False)
    return replace(blank, errors={name: relative_error(found, exact) for name, found, exact in pairs})


def _case(shape: KernelShape) -> tuple[list[mx.array], mx.array, dict]:
    """q, k, v and the sinks, where there are any; dy; the options. By NumPy: MLX's random state is the training's."""
    draw = np.random.default_rng(0)
    heads = _KEY_HEADS * (2 if shape.grouped else 1)
    sizes = [(heads, shape.size), (_KEY_HEADS, shape.size), (_KEY_HEADS, shape.value_size), (heads, shape.value_size)]
    drawn = [draw.normal(size=(_BATCH, count, _LENGTH, size)).astype(np.float32) for count, size in sizes]
    *arrays, dy = (mx.array(x).astype(getattr(mx, shape.dtype)) for x in drawn)
    options: dict = {"scale": shape.size**-0.5, "causal": shape.causal}
    if shape.windowed:
        options["window"] = _WINDOW
    if shape.segmented:
        options["segments"] = mx.array(np.arange(_LENGTH, dtype=np.int32)[None] // _SEGMENT)
    if shape.sunk:
        arrays.append(mx.array(draw.normal(size=heads).astype(np.float32)))
    return arrays, dy, options


def _differentiate(function: Implementation, arrays: list[mx.array], dy: mx.array, options: dict) -> list[np.ndarray]:
    def call(*given: mx.array) -> list[mx.array]:
        sinks = given[3] if len(given) > 3 else None
        return [function(*given[:3], sinks=sinks, **options)]

    # Freed memory is used again: an element that is not written stays NaN.
    mx.eval([mx.full(x.shape, np.nan, x.dtype) for x in (*arrays, dy)])
    outputs, gradients = mx.vjp(call, arrays, [dy])
    wide = [x.astype(mx.float32) for x in (*outputs, *gradients)]
    mx.eval(wide)
    return [np.array(x) for x in wide]
