"""Checks once per machine whether an implementation computes what `chunk` computes.

choice.py asks `of` before it uses a fast implementation for a class of shapes for the first time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...machine import backend
from ..kernels.cubin import built_side_by_side
from ..trial import verdicts
from ..trial.measure import ROUNDING, relative_error
from ..trial.timing import Run
from ..trial.verdicts import Verdict
from .chunk import gated_delta_chunk
from .naive import gated_delta_naive
from .tolerances import EASY, SLOW, fused_bound
from .trial_gates import SLOW_TOKENS, draw_log_gates, draw_segments, errors_by_gates, slow_name

logger = logging.getLogger(__name__)

NAMES = ("y", "state", "dq", "dk", "dv", "dlog_g", "dbeta", "dinitial_state")
# The check runs two batch rows over more than two chunks of any implementation, the last of which lacks tokens. Errors
# of slow gates add up over a row.
BATCH, LENGTH = 2, SLOW_TOKENS + 6
# The reference computes two key heads. The implementation gets as many as the class has, each a copy of one of the two,
# chosen at random, so that a head which reads or writes the place of another gives a wrong result.
_REFERENCE_HEADS = 2
# The heads of each argument and cotangent: k for key heads on axis 2, v for value heads on axis 2, s for value heads on
# axis 1 (a state's).
_PRIMALS, _COTANGENTS = "kkvvvs", "vs"
Implementation = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class ShapeClass:
    """A class of calls that run the same kernels, whatever their batch and length. They share a verdict.

    `tiling` says how the implementation divides the work, where it has a choice, and `beta` in which dtype it reads
    beta.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: str
    masked: bool = False
    segmented: bool = False
    per_channel: bool = False
    tiling: str = ""
    beta: str = "float32"

    def __str__(self) -> str:
        heads = f"{self.key_heads}/{self.value_heads} heads of {self.key_size} x {self.value_size}"
        options = [name for name in ("masked", "segmented", "per_channel") if getattr(self, name)]
        beta = [] if self.beta == "float32" else [f"beta in {self.beta}"]
        return ", ".join([self.dtype, heads, *(option.replace("_", "-") for option in options), *beta])


def of(name: str, function: Implementation, shape: ShapeClass) -> Verdict:
    """Return the verdict on an implementation for a class of calls: the stored one, or else that of a check now.

    The check has arrays of its own and evaluates them at once, so it may run while something else is being traced.

    Args:
        name: The name of the implementation.
        function: Called as `gated_delta` is, on the check's small arrays.
        shape: The class of calls.
    """
    return verdicts.of(verdicts.stored("gated_delta", name), shape, lambda: measure(name, function, shape))


def again(name: str, function: Implementation, shape: ShapeClass) -> Verdict:
    """Check now, whatever verdict is stored, and store the new one. Arguments and result are those of `of`."""
    return verdicts.again(verdicts.stored("gated_delta", name), shape, lambda: measure(name, function, shape))


def measure(name: str, function: Implementation, shape: ShapeClass, *, by_recurrence: bool = False) -> Verdict:
    """Compare an implementation with the reference in fp32 on the CPU, forward and backward, with gates of every kind.

    Args:
        name, function, shape: As in `of`.
        by_recurrence: Whether the reference is naive, and not chunk.
    """
    started = time.perf_counter()
    case = _case(shape)
    reference = gated_delta_naive if by_recurrence else gated_delta_chunk
    bound, slow = (x + ROUNDING[shape.dtype] if by_recurrence else fused_bound(x, shape.dtype) for x in (EASY, SLOW))
    of_slow_gates = {slow_name(result): slow for result in NAMES}
    blank = Verdict(name, str(shape), bound, reference="naive" if by_recurrence else "chunk", bounds=of_slow_gates)
    # On the CPU, because a GPU may multiply fp32 matrices in TF32.
    with mx.stream(mx.cpu):
        reference_results = _differentiate(reference, case.reference_primals, case.constants, case.reference_cotangents)
    expected = _copy_heads(reference_results, _COTANGENTS + _PRIMALS, case)
    reference_seconds = time.perf_counter() - started
    try:
        _build(function, case)
        results = _differentiate(function, case.primals, case.constants, case.cotangents)
    except (RuntimeError, ValueError) as error:
        return replace(blank, problem=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    logger.info(
        "gated_delta: %s was checked in %.1f s, of which the reference took %.1f", name, seconds, reference_seconds
    )
    errors: dict[str, float] = {}
    for result, found, exact in zip(NAMES, results, expected, strict=True):
        errors |= errors_by_gates(result, relative_error, found, exact)
    return replace(blank, errors=errors)


def runs(given: Mapping[str, tuple[Implementation, ShapeClass]]) -> dict[str, Run]:
    """Return what is timed of each implementation: a forward and a backward pass on the arrays of the first's check."""
    case = _case(next(iter(given.values()))[1])
    mx.eval(case.primals, case.cotangents)

    def run(function: Implementation) -> list[mx.array]:
        outputs, gradients = _traced(function, case.primals, case.constants, case.cotangents)
        return [*outputs, *gradients]

    return {name: partial(run, function) for name, (function, _) in given.items()}


def build(function: Implementation, shape: ShapeClass) -> None:
    """Build the kernels of the forward and the backward pass side by side, where an NVIDIA GPU has them to build."""
    _build(function, _case(shape))


def _build(function: Implementation, case: _Case) -> None:
    if backend.device() == "cuda":
        with built_side_by_side():
            _traced(function, case.primals, case.constants, case.cotangents)


def _traced(function: Implementation, primals: list, constants: dict, cotangents: list) -> tuple[list, list]:
    """Return the outputs and the gradients of the six float arguments, not computed yet."""

    def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return function(*arrays[:-1], initial_state=arrays[-1], **constants)

    return mx.vjp(call, primals, cotangents)


def _differentiate(function: Implementation, primals: list, constants: dict, cotangents: list) -> list[np.ndarray]:
    """Return y, the final state and the gradients of the six float arguments, in fp32."""
    outputs, gradients = _traced(function, primals, constants, cotangents)
    wide = [x.astype(mx.float32) for x in (*outputs, *gradients)]
    mx.eval(wide)
    return [np.array(x) for x in wide]


class _Case(NamedTuple):
    """The arguments of a check.

    The implementation gets `primals` and `cotangents` in its dtype; the reference gets a few heads of them in fp32.
    `key_heads` and `value_heads` say which of the reference's heads each of the implementation's copies.
    """

    primals: list[mx.array]
    cotangents: list[mx.array]
    reference_primals: list[mx.array]
    reference_cotangents: list[mx.array]
    constants: dict[str, mx.array | None]
    key_heads: np.ndarray
    value_heads: np.ndarray


def _case(shape: ShapeClass) -> _Case:
    """Draw the arguments with NumPy, because MLX's random state belongs to the training."""
    draw = np.random.default_rng(0)
    heads, repeats = min(_REFERENCE_HEADS, shape.key_heads), shape.value_heads // shape.key_heads
    key_heads = np.concatenate([np.arange(heads), draw.integers(heads, size=shape.key_heads - heads)])
    floats = _floats(draw, replace(shape, key_heads=heads, value_heads=heads * repeats))
    dtype = getattr(mx, shape.dtype)
    few = [mx.array(x.astype(np.float32)) for x in floats]
    for index in (0, 1, 2, 6):
        few[index] = few[index].astype(dtype)
    few[4] = few[4].astype(getattr(mx, shape.beta))
    mask = np.ones((BATCH, LENGTH), bool)
    mask[0, LENGTH // 3 : LENGTH // 2], mask[1, :3] = False, False
    segments = draw_segments(draw, BATCH, LENGTH)
    constants = {
        "mask": mx.array(mask) if shape.masked else None,
        "segments": mx.array(segments) if shape.segmented else None,
    }
    value_heads = (key_heads[:, None] * repeats + np.arange(repeats)).reshape(-1)
    wide = [x.astype(mx.float32) for x in few]
    case = _Case([], [], wide[:6], wide[6:], constants, key_heads, value_heads)
    copies = _copy_heads([np.array(x) for x in wide], _PRIMALS + _COTANGENTS, case)
    arrays = [mx.array(x).astype(small.dtype) for x, small in zip(copies, few, strict=True)]
    return case._replace(primals=arrays[:6], cotangents=arrays[6:])


def _floats(draw: np.random.Generator, shape: ShapeClass) -> list[np.ndarray]:
    """Return q, k, v, log_g, beta and the initial state, then the gradients of y and of the final state."""
    keys, values = (
        (BATCH, LENGTH, shape.key_heads, shape.key_size),
        (BATCH, LENGTH, shape.value_heads, shape.value_size),
    )
    k = draw.normal(size=keys)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = (*values[:3], shape.key_size) if shape.per_channel else values[:3]
    state = (BATCH, shape.value_heads, shape.value_size, shape.key_size)
    floats = [draw.normal(size=keys) * shape.key_size**-0.5, k, draw.normal(size=values)]
    floats += [draw_log_gates(draw, gates), draw.uniform(0.05, 0.95, size=values[:3]), draw.normal(size=state)]
    return [*floats, draw.normal(size=values), draw.normal(size=state)]


def _copy_heads(arrays: Sequence[np.ndarray], kinds: str, case: _Case) -> list[np.ndarray]:
    """Return arrays of the reference's heads with all heads of the class. The gradient of a copy is a copy, too."""
    heads = {"k": (case.key_heads, 2), "v": (case.value_heads, 2), "s": (case.value_heads, 1)}
    return [np.take(x, *heads[kind]) for x, kind in zip(arrays, kinds, strict=True)]
