"""The cases on which an implementation of attention is tried before its first use for a class of calls, and timed.

Their truth is in float64 NumPy, from the definition. Bounds of the check limit the largest error of an output or
gradient relative to its own largest element, bounds of the tests the norm of the error relative to that of the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...machine import backend
from ..operator.case import Case, judged
from ..operator.measure import ROUNDING, as_float64, relative_norm
from ..operator.timing import length_class
from ..operator.verdicts import Verdict
from .blocked import attention_blocked

NAMES = ("y", "dq", "dk", "dv", "dsinks")


def attention64(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dy: np.ndarray,
    *,
    scale: float,
    causal: bool = True,
    segments: np.ndarray | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Compute the output and the gradients of attention in float64, from the definition.

    Args are those of `attention`, and dy, the cotangent of the output. The results come by NAMES, without `dsinks`
    where there are no sinks.
    """
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    batch, key_heads, keys, _ = k.shape
    queries_a_key = q.shape[1] // key_heads
    wide_k, wide_v = (np.repeat(x, queries_a_key, axis=1) for x in (k, v))
    scores = scale * (q @ wide_k.swapaxes(-1, -2))
    visible = np.broadcast_to(_visible(q.shape[2], keys, causal, segments, window), scores.shape)
    if mask is not None:
        mask = np.broadcast_to(mask, scores.shape)
        visible = visible & (mask if mask.dtype == bool else mask > -1e30)
        if mask.dtype != bool:
            scores = scores + np.where(visible, mask, 0.0)
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64).reshape(1, -1, 1, 1)
        most = np.maximum(most, sinks)
    most = np.where(np.isfinite(most), most, 0.0)
    weights = np.exp(scores - most)
    of_sink = np.zeros_like(most) if sinks is None else np.exp(sinks - most)
    total = weights.sum(axis=-1, keepdims=True) + of_sink
    total = np.where(total == 0, 1.0, total)
    weights, of_sink = weights / total, of_sink / total
    y = weights @ wide_v
    dweights = dy @ wide_v.swapaxes(-1, -2)
    delta = (dy * y).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - delta)
    results = {"y": y, "dq": scale * dscores @ wide_k}
    of_heads = (batch, key_heads, queries_a_key, keys, -1)
    results["dk"] = (scale * dscores.swapaxes(-1, -2) @ q).reshape(of_heads).sum(axis=2)
    results["dv"] = (weights.swapaxes(-1, -2) @ dy).reshape(of_heads).sum(axis=2)
    if sinks is not None:
        results["dsinks"] = -(of_sink * delta).sum(axis=(0, 2, 3))
    return results


def _visible(queries: int, keys: int, causal: bool, segments: np.ndarray | None, window: int | None) -> np.ndarray:
    """Which keys each query sees, [1 or B, 1, TQ, TK]; the last query stands at the last key."""
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None]
    visible = np.ones((1, 1, queries, keys), bool)
    if causal:
        visible = visible & (key <= place)
    if window is not None:
        visible = visible & (key > place - window)
    if segments is not None:
        visible = visible & (segments[:, None, keys - queries :, None] == segments[:, None, None, :])
    return visible


# For fp32, scores of usual size, and sums of up to a thousand products and weights.
NORMAL = 2e-6

# A score's rounding error is the relative error of its weight. Per unit of the score it is 2^-24 for the sum that gives
# the score, 2^-24 for the logarithm that is subtracted from it, and as much for the product of either with log2(e).
OF_A_SCORE = 4 * 2.0**-24


def fp32_bound(largest_score: float) -> float:
    """Return the error that fp32 may show where scores reach `largest_score`."""
    return NORMAL + OF_A_SCORE * largest_score


def fused_bound(dtype: str) -> float:
    """Return the error that the fused kernels may show in their check.

    Weights and their gradients are rounded to the inputs' dtype before they are multiplied, and so are the results.
    """
    return NORMAL + 2 * ROUNDING[dtype]


def half_norm(dtype: str) -> float:
    """Return the tolerance of the relative norm of an error in half precision.

    The root of the mean squared rounding error is 0.29 units in the last place, which is 0.29 to 0.58 of ROUNDING times
    the number. A gradient is rounded twice: first the weights or their gradients, then the result.
    """
    return NORMAL + 2**0.5 * 0.58 * ROUNDING[dtype]


Implementation = Callable[..., mx.array]
# The length is more than two tiles of any kernel, the last one incomplete. Window and segments end inside tiles.
_BATCH, _LENGTH, _KEY_HEADS, _WINDOW, _SEGMENT = 1, 300, 2, 90, 130
# The timed runs have longer rows, of which a GPU has some milliseconds of work; those of long calls have fewer heads.
_TIMED_LENGTH, _TIMED_KEY_HEADS, _LONGEST_TIMED = 1024, 4, 8192


@dataclass(frozen=True)
class KernelShape:
    """A class of calls that run the same kernels, whatever their batch and length. They share a verdict.

    `machine` is one of fused_op.MACHINES; heads of queries and keys have `size` numbers, and heads are `grouped` where
    several query heads read one key head. The calls have more keys than `longer_than`, one of timing.LENGTHS, where
    implementations are timed.
    """

    machine: str
    size: int
    value_size: int
    dtype: str
    grouped: bool = False
    causal: bool = True
    windowed: bool = False
    segmented: bool = False
    with_sinks: bool = False
    longer_than: int = 0

    def __str__(self) -> str:
        options = [name for name in ("grouped", "causal", "windowed", "segmented", "with_sinks") if getattr(self, name)]
        options = [option.replace("_", " ") for option in options]
        options += [f"more than {self.longer_than:,} keys"] * (self.longer_than > 0)
        machine = [self.machine] if self.machine else []
        return ", ".join([*machine, self.dtype, f"heads of {self.size} x {self.value_size}", *options])


def trial_case(shape: KernelShape) -> Case[Implementation]:
    """Return the case of a class of calls, forward and backward."""
    return case_of(shape, drawn(shape, _LENGTH, _KEY_HEADS))


def timed_case(shape: KernelShape, *, length: int | None = None) -> Case[Implementation]:
    """Return the case on which implementations are timed, on rows of another length where one is given."""
    if length is not None:
        return case_of(shape, drawn(shape, length, _TIMED_KEY_HEADS if length < _LONGEST_TIMED else 1))
    if shape.longer_than:
        return case_of(shape, drawn(shape, min(2 * shape.longer_than, _LONGEST_TIMED), 1))
    return case_of(shape, drawn(shape, _TIMED_LENGTH, _TIMED_KEY_HEADS))


# q, k, v and, for a class with sinks, the sinks; dy; and the other arguments.
Drawn = tuple[list[mx.array], mx.array, dict[str, Any]]


def case_of(shape: KernelShape, drawn: Drawn) -> Case[Implementation]:
    """Return the case of these arrays, with its reference in float64."""
    arrays, dy, options = drawn

    def truth() -> list[np.ndarray]:
        wide = [as_float64(x) for x in (*arrays[:3], dy)]
        others: dict[str, Any] = {name: np.array(x) if isinstance(x, mx.array) else x for name, x in options.items()}
        sinks = as_float64(arrays[3]) if len(arrays) > 3 else None
        return list(attention64(*wide, sinks=sinks, **others).values())

    return Case(
        name=str(shape),
        results=NAMES[: 1 + len(arrays)],
        call=lambda function: differentiated(function, arrays, dy, options),
        truth=truth,
        bound=fused_bound(shape.dtype),
        like=[*arrays, dy],
    )


def differentiated(function: Implementation, arrays: Sequence[mx.array], dy: mx.array, options: dict) -> list[mx.array]:
    """Return y and the gradients of q, k, v and, if they are among the arrays, the sinks, not computed yet."""

    def call(*arrays: mx.array) -> list[mx.array]:
        sinks = arrays[3] if len(arrays) > 3 else None
        return [function(*arrays[:3], sinks=sinks, **options)]

    outputs, gradients = mx.vjp(call, list(arrays), [dy])
    return [*outputs, *gradients]


def drawn(shape: KernelShape, length: int, key_heads: int, ratio: int = 2) -> Drawn:
    """Draw the arguments of heads of which `ratio` read one key head where they are grouped.

    NumPy draws them, because MLX's random state belongs to the training.
    """
    draw = np.random.default_rng(0)
    heads = key_heads * (ratio if shape.grouped else 1)
    sizes = [(heads, shape.size), (key_heads, shape.size), (key_heads, shape.value_size), (heads, shape.value_size)]
    floats = [draw.normal(size=(_BATCH, count, length, size)).astype(np.float32) for count, size in sizes]
    *arrays, dy = (mx.array(x).astype(getattr(mx, shape.dtype)) for x in floats)
    options: dict[str, Any] = {"scale": shape.size**-0.5, "causal": shape.causal}
    if shape.windowed:
        options["window"] = min(_WINDOW, length * _WINDOW // _LENGTH)
    if shape.segmented:
        segment = min(_SEGMENT, length * _SEGMENT // _LENGTH)
        options["segments"] = mx.array(np.arange(length, dtype=np.int32)[None] // segment)
    if shape.with_sinks:
        arrays.append(mx.array(draw.normal(size=heads).astype(np.float32)))
    return arrays, dy, options


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call of `attention`, which decide which implementation can serve it."""

    q: mx.array
    k: mx.array
    v: mx.array
    causal: bool
    segments: mx.array | None
    window: int | None
    sinks: mx.array | None
    mask: mx.array | None
    scale: float

    def shape_class(self, machine: str) -> KernelShape:
        """Return the class of calls that share a verdict on the kernels of `machine`."""
        dtype = str(self.q.dtype).removeprefix("mlx.core.")
        windowed = self.window is not None and self.window < self.k.shape[2]
        options = (self.causal, windowed, self.segments is not None, self.sinks is not None)
        grouped = self.q.shape[1] > self.k.shape[1]
        # A machine on which the order was measured needs no verdict for each length.
        longer_than = length_class(self.k.shape[2]) if machine in ("", "metal") else 0
        return KernelShape(machine, self.q.shape[3], self.v.shape[3], dtype, grouped, *options, longer_than)

    @property
    def words(self) -> str:
        """The class of the call, in words that are the same on every machine."""
        fewer = self.q.shape[2] != self.k.shape[2]
        more = ["with a mask"] * (self.mask is not None) + ["fewer queries than keys"] * fewer
        return ", ".join([str(self.shape_class("")), *more])


@dataclass(frozen=True)
class AttentionWorkload:
    """A call of attention with one row; `ratio` heads of q read one key head where heads are grouped."""

    name: str
    shape: KernelShape
    length: int
    key_heads: int = 4
    ratio: int = 2

    def drawn(self) -> Drawn:
        """Draw the arguments."""
        return drawn(self.shape, self.length, self.key_heads, self.ratio)

    def call(self) -> AttentionCall:
        """The call, for the choice of an implementation."""
        (q, k, v, *sinks), _, options = self.drawn()
        segments, window = options.get("segments"), options.get("window")
        sink = sinks[0] if sinks else None
        return AttentionCall(q, k, v, self.shape.causal, segments, window, sink, None, options["scale"])

    def case(self, implementation: str) -> Case[Implementation]:
        """The case, with the bounds on relative norms that hold for every implementation (tolerances.py)."""
        bound = NORMAL if self.shape.dtype == "float32" else half_norm(self.shape.dtype)
        return replace(case_of(self.shape, self.drawn()), name=self.name, bound=bound, error=relative_norm)


def workloads(quick: bool) -> list[AttentionWorkload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    length, part = (70, 4) if quick else (300, 1)
    wide, latent = 256 // part, (192 // part, 128 // part)
    grouped = KernelShape("", wide, wide, "bfloat16", grouped=True)
    packed = replace(grouped, dtype="float32", segmented=True)
    sinks = KernelShape("", 64, 64, "float32", windowed=True, with_sinks=True)
    image = KernelShape("", 72, 72, "bfloat16", causal=False, segmented=True)
    return [
        AttentionWorkload("grouped heads, bf16", grouped, length, 2, 4),
        AttentionWorkload("packed, fp32", packed, length, 2, 4),
        AttentionWorkload("latent, bf16", KernelShape("", *latent, "bfloat16", segmented=True), length),
        AttentionWorkload("windows and sinks, fp32", sinks, length, 8),
        AttentionWorkload("an image, bf16", image, length),
    ]


# Grouped heads of 256, latent attention, a vision tower, windows with sinks, and towers in fp32, of which the narrow
# ones have the largest errors beside their results.
HEADS = (
    KernelShape("", 256, 256, "bfloat16", grouped=True),
    KernelShape("", 192, 128, "bfloat16", segmented=True),
    KernelShape("", 72, 72, "bfloat16", causal=False, segmented=True),
    KernelShape("", 64, 64, "float32", grouped=True, windowed=True, with_sinks=True),
    *(KernelShape("", size, size, "float32", causal=False) for size in (32, 72, 80)),
)
# Tokens of a call: long enough for every implementation.
_EXAMPLE_LENGTH = 1024


def calls() -> list[AttentionCall]:
    """Return a call of each class of HEADS."""
    return [AttentionWorkload(str(shape), shape, _EXAMPLE_LENGTH, 1 if shape.grouped else 2).call() for shape in HEADS]


def compare_blocked() -> list[Verdict]:
    """Compare `blocked` with the definition."""
    shapes = [replace(shape, machine=backend.device()) for shape in HEADS]
    return [judged(trial_case(shape), attention_blocked, "blocked") for shape in shapes]
