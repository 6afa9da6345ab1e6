"""Measures time and peak memory of gated_delta forward and backward, of upstream's loop and of MLX's own operator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from ..errors import first_line
from ..machine import backend
from ..ops.gated_delta import gated_delta, native
from ..ops.gated_delta.choice import OPERATOR
from ..ops.gated_delta.trial_case import SLOW_TOKENS, Call, ShapeClass, Workload, draw_floats, truth_of
from ..ops.operator import candidates
from ..patches.recurrence import gated_delta_loop
from ..plan.device_limits import device_limits
from .outcome import FAILED, FAILURES, NOT_RUN, PASSED, Check, Outcome, not_run, tried

OURS, LOOP, NATIVE = "deltatune", "mlx-lm's loop", "MLX's own operator"
# Tokens of the comparison with float64 that precedes each measurement.
_CHECKED = SLOW_TOKENS
# Bounds on the errors of other implementations. They take gates instead of logarithms, so that d(log_g) loses digits
# where a gate is 1e-12.
_AGREES = {"float32": 1e-4, "bfloat16": 1e-2}
# Each figure is the median of as many calls as fit into these seconds, up to a largest number of calls.
_SECONDS, _CALLS = 2.0, 10
# A loop's graph holds about this many fp32 states per token until the backward pass has read them.
_KEPT_STATES = 5
# A size is skipped where a call would take longer than these seconds, estimated from the size before.
_LONGEST = 20.0


@dataclass(frozen=True)
class Timing:
    """One implementation on one size: the median time of a call and its peak memory beyond the inputs, or why not."""

    implementation: str
    size: str
    tokens: int
    milliseconds: float | None = None
    peak_bytes: int | None = None
    skipped: str | None = None


def sizes(quick: bool) -> list[Workload]:
    """The sizes to measure, each four times the one before: few heads in fp32 on a CPU, a model's in bf16 on a GPU."""
    if quick:
        return [Workload("B1 T96 H2/2 D32 fp32", ShapeClass(2, 2, 32, 32, "float32"), 96)]
    if backend.computes_in_fp32():
        return [_size(length, 4, 4, "float32") for length in (512, 2048)]
    return [_size(length, 16, 32, "bfloat16") for length in (512, 2048, 8192)]


def _size(length: int, key_heads: int, value_heads: int, dtype: str) -> Workload:
    short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    name = f"B1 T{length} H{key_heads}/{value_heads} D128 {short}"
    return Workload(name, ShapeClass(key_heads, value_heads, 128, 128, dtype), length)


def measure(name: str, function: Callable, quick: bool) -> list[Timing]:
    """Measure an implementation, which was found right before, from the smallest size to the largest."""
    timings: list[Timing] = []
    a_token = 0.0
    for workload in sizes(quick):
        timing = partial(Timing, name, workload.name, workload.length)
        reason = _too_much(name, workload, a_token)
        if reason is not None:
            timings.append(timing(skipped=reason))
            continue
        try:
            milliseconds, peak = _timed(function, workload)
        except FAILURES as error:
            timings.append(timing(skipped=f"does not run: {first_line(error)[:200]}"))
            break
        a_token = milliseconds / 1e3 / workload.length
        timings.append(timing(milliseconds=milliseconds, peak_bytes=peak))
    return timings


def _too_much(name: str, workload: Workload, a_token: float) -> str | None:
    seconds = a_token * workload.length
    if seconds > _LONGEST:
        return f"would take about {seconds:.0f} s a call"
    limit = device_limits().bytes
    needed = workload.length * workload.shape.value_heads * workload.shape.key_size**2 * 4 * _KEPT_STATES
    loops = name == LOOP or (name == NATIVE and native.loops())
    if loops and limit is not None and needed > limit // 2:
        return f"would need about {needed / 2**30:.0f} GiB"
    return None


def _timed(function: Callable, workload: Workload) -> tuple[float, int]:
    """The median time of a call in milliseconds, and its peak memory beyond the inputs in bytes."""
    drawn = draw_floats(np.random.default_rng(0), workload.shape, 1, workload.length)
    q, k, v, log_g, beta, _, dy, _ = (mx.array(x.astype(np.float32)) for x in drawn)
    dtype = getattr(mx, workload.shape.dtype)
    floats = [*(x.astype(dtype) for x in (q, k, v)), log_g, beta]
    dy = dy.astype(dtype)
    mx.eval(floats, dy)

    def call() -> None:
        outputs, gradients = mx.vjp(lambda *arrays: function(*arrays)[0], floats, [dy])
        mx.eval(outputs, gradients)

    call()
    mx.synchronize()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    mx.synchronize()
    peak = mx.get_peak_memory() - held
    begun = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < _CALLS and (not seconds or time.perf_counter() - begun < _SECONDS):
        start = time.perf_counter()
        call()
        mx.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3, peak


def _checked(name: str, function: Callable, quick: bool, timings: list[Timing]) -> Outcome:
    """Measure an implementation only after a comparison with float64 that it passes."""
    first = sizes(quick)[0]
    short = replace(first, length=min(_CHECKED, first.length))
    if name == LOOP:
        # With all heads its graph would need 10 GB.
        few = replace(first.shape, key_heads=2, value_heads=2 * first.shape.value_heads // first.shape.key_heads)
        short = replace(short, shape=few)
    agrees = _AGREES[short.shape.dtype]
    if name == OURS:
        allowed = short.bounds(candidates.choose(OPERATOR, short.call())[0])
    else:
        allowed = dict.fromkeys(truth_of(short).peers, agrees)
    outcome = tried(short.case_within(allowed), function)
    if outcome.status != PASSED:
        timings += [Timing(name, size.name, size.length, skipped="wrong, so not timed") for size in sizes(quick)]
        # Training does not use the other implementations, so that their errors are no failure.
        status = FAILED if name == OURS else NOT_RUN
        return Outcome(status, f"differs from float64: {outcome.detail}", outcome.errors, outcome.bounds)
    measured = measure(name, function, quick)
    timings += measured
    facts = {"timings": [asdict(timing) for timing in measured]}
    figures = [f"{t.milliseconds:,.1f} ms at {t.tokens:,} tokens" for t in measured if t.milliseconds is not None]
    detail = ", ".join(figures) or measured[0].skipped or ""
    return Outcome(PASSED, detail, outcome.errors, outcome.bounds, facts)


def _native(quick: bool, timings: list[Timing]) -> Outcome:
    call = Call.of_class(sizes(quick)[0].shape)
    reason = native.unsupported(call.k, call.v, call.log_g)
    if reason is not None:
        timings += [Timing(NATIVE, size.name, size.length, skipped=reason) for size in sizes(quick)]
        return not_run(reason)
    return _checked(NATIVE, native.gated_delta_native, quick, timings)


def checks(quick: bool, timings: list[Timing]) -> Iterator[Check]:
    """One check for each implementation; the measurements are appended to `timings`."""
    yield Check(f"times: {OURS}", partial(_checked, OURS, gated_delta, quick, timings))
    yield Check(f"times: {NATIVE}", partial(_native, quick, timings))
    yield Check(f"times: {LOOP}", partial(_checked, LOOP, gated_delta_loop, quick, timings))
