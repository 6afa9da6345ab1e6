"""Compares the pointwise passes around the recurrence with MLX's operations in float64, at the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np

from ..machine import backend
from ..ops.kernels.launch import Launch
from ..ops.pointwise import (
    conv_heads,
    conv_silu,
    gated_norm,
    gates,
    norm,
    norm_and_gate,
    swiglu,
    times_gate,
    turned_heads,
)
from ..ops.pointwise.adam import AdamStep
from ..ops.pointwise.conv import NormedHeads
from ..ops.pointwise.joining import end_to_end
from ..ops.pointwise.pass_launch import Execute, Pass
from ..ops.pointwise.rows import sum_rows, take_rows
from ..ops.pointwise.unpacking import unpack
from ..ops.pointwise.weighted_norms import sum_norm
from ..ops.trial.case import Case
from ..ops.trial.measure import as_float64, relative_norm
from .outcome import Check, Outcome, not_run, tried

# Bounds on relative norms. A rounding to bf16 costs 1.7e-3. Gradients of parameters pass up to nine such roundings in
# MLX's operations, and independent roundings add up to the square root of their number.
BOUNDS = {mx.float32: 1e-6, mx.bfloat16: 3 * 1.7e-3}
_NAMES = {mx.float32: "fp32", mx.bfloat16: "bf16"}
Shapes = list[tuple[int, ...]]
_EPS = 1e-6
_GROUP = 64


def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """1 / sqrt(mean(x^2) + eps) over the last axis."""
    return mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def reference_gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, largest_beta: float = 1.0
) -> tuple[mx.array, mx.array]:
    """The definition of `gates`, in float64."""
    return -mx.exp(A_log) * mx.logaddexp(a + dt_bias, mx.zeros((), mx.float64)), largest_beta * mx.sigmoid(b)


def reference_conv(x: mx.array, weight: mx.array, length: int, owner: np.ndarray | None) -> mx.array:
    """The definition of `conv_silu` as a sum over taps, in float64.

    owner: [T], the document of each token; no tap reaches into another document.
    """
    taps = weight.shape[1]
    total = mx.zeros((x.shape[0], length, x.shape[2]), mx.float64)
    for tap in range(taps):
        same_document = np.ones(length)
        if owner is not None:
            before = np.maximum(0, np.arange(length) - (taps - 1 - tap))
            same_document = (owner[before] == owner).astype(np.float64)
        # mx.array turns NumPy's float64 into float32, in which zeros and ones are exact.
        inside = mx.array(same_document).astype(mx.float64)
        total = total + x[:, tap : tap + length] * weight[:, tap] * inside[:, None]
    return total * mx.sigmoid(total)


def reference_heads(
    x: mx.array, weight: mx.array, heads: NormedHeads, state: mx.array | None = None, owner: np.ndarray | None = None
) -> tuple[mx.array, ...]:
    """The definition of `conv_heads`, in float64, with `owner` as for `reference_conv`."""
    batch, length, channels = x.shape
    if state is None:
        state = mx.zeros((batch, weight.shape[1] - 1, channels), mx.float64)
    y = reference_conv(mx.concatenate([state, x], axis=1), weight, length, owner)
    q, k, v = mx.split(y, [heads.channels, 2 * heads.channels], axis=-1)
    q, k = (part.reshape(batch, length, heads.count, heads.size) for part in (q, k))
    q, k = (part * inverse_rms(part, heads.eps) for part in (q, k))
    return heads.query_factor * q, heads.key_factor * k, v


def reference_turned_heads(
    x: mx.array, weight: mx.array, eps: float, rotary_dims: int, base: float, gated: bool
) -> tuple[mx.array, ...]:
    """The definition of `turned_heads`, in float64."""
    width, half = weight.shape[0], rotary_dims // 2
    angles = np.outer(np.arange(x.shape[1]), base ** (-np.arange(half) / half))
    # MLX's own cosine has the digits of fp32 alone, in float64 too.
    cosine, sine = (mx.array(of(angles), dtype=mx.float64) for of in (np.cos, np.sin))
    rows = (x[..., :width] * inverse_rms(x[..., :width], eps) * weight).swapaxes(1, 2)
    one, other, unturned = mx.split(rows, [half, rotary_dims], axis=-1)
    y = mx.concatenate([one * cosine - other * sine, other * cosine + one * sine, unturned], axis=-1)
    return (y, mx.sigmoid(x[..., width:])) if gated else (y,)


@dataclass(frozen=True)
class PointwiseCase:
    """A pass by name, its definition for float64, the shapes of its arguments, and what runs it on a GPU."""

    name: str
    ours: Callable[..., Any]
    exact: Callable[..., Any]
    shapes: Shapes
    execute: Callable[[Any], list[mx.array]] = Pass.run

    def trial_case(self, dtype: mx.Dtype) -> Case[Callable[[Any], list[mx.array]]]:
        """The case of arguments of this dtype: outputs and gradients, whose truth is in float64 on the CPU."""
        keys = mx.random.split(mx.random.key(3), len(self.shapes))
        arrays = [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(self.shapes, keys, strict=True)]
        outputs = _listed(partial(self.ours, execute=_not_run))(*arrays)
        normal = (mx.random.normal(y.shape, key=mx.random.key(5 + i)) for i, y in enumerate(outputs))
        cotangents = [x.astype(y.dtype) for x, y in zip(normal, outputs, strict=True)]

        def call(execute: Callable[[Any], list[mx.array]]) -> list[mx.array]:
            results, gradients = mx.vjp(_listed(partial(self.ours, execute=execute)), arrays, cotangents)
            return [*results, *gradients]

        def truth() -> list[np.ndarray]:
            with mx.stream(mx.cpu):
                primals, d = ([array.astype(mx.float64) for array in group] for group in (arrays, cotangents))
                results, gradients = mx.vjp(_listed(self.exact), primals, d)
                return [np.array(array) for array in (*results, *gradients)]

        names = [f"output {i}" for i in range(len(outputs))] + [f"gradient {i}" for i in range(len(arrays))]
        return Case(self.name, names, call, truth, BOUNDS[dtype], error=relative_norm)


def _not_run(launch: Pass | Launch) -> list[mx.array]:
    """Arrays of the shapes and dtypes of a launch's outputs."""
    return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs.values()]


def cases(quick: bool) -> list[PointwiseCase]:
    """Every pass that has a gradient; `quick` makes the arrays small."""
    rows, heads, width = (6, 4, 64) if quick else (4096, 32, 128)
    batch, length, channels, taps = (2, 19, 24, 4) if quick else (2, 2048, 2048, 4)
    owner = np.arange(length) // 7 if quick else np.arange(length) // 300
    inputs: Shapes = [(batch, taps - 1 + length, channels), (channels, taps)]

    def convolved(segments: mx.array | None) -> Callable[..., mx.array]:
        return lambda x, weight, execute: conv_silu(x, weight, segments, execute=execute)

    documents = mx.broadcast_to(mx.array(owner.astype(np.int32)), (batch, length))
    normed: Shapes = [(rows, heads, width)]
    few = NormedHeads(4, width, 1 / width, width**-0.5, _EPS / width)
    joined = 4 * few.channels
    of_heads: Shapes = [(batch, length, joined), (joined, taps), (batch, taps - 1, joined)]
    return [
        PointwiseCase("swiglu", swiglu, lambda g, x: g * mx.sigmoid(g) * x, [(rows, heads * width)] * 2),
        PointwiseCase("norm", partial(norm, factor=0.25, eps=_EPS), lambda x: 0.25 * x * inverse_rms(x, _EPS), normed),
        PointwiseCase(
            "gated norm",
            lambda x, g, w, execute: gated_norm(x, w, g, _EPS, execute=execute),
            lambda x, g, w: x * inverse_rms(x, _EPS) * w * g * mx.sigmoid(g),
            [*normed * 2, (width,)],
        ),
        PointwiseCase(
            "norm and gate",
            lambda x, w, execute: norm_and_gate(x, w, _EPS, execute=execute),
            lambda x, w: (x[..., :width] * inverse_rms(x[..., :width], _EPS) * w, mx.sigmoid(x[..., width:])),
            [(rows, heads, 2 * width), (width,)],
        ),
        *_around_attention(quick, width),
        PointwiseCase(
            "sum and norm",
            lambda x, other, w, execute: tuple(sum_norm(x, other, w, _EPS, execute=execute)),
            lambda x, other, w: (x + other, (x + other) * inverse_rms(x + other, _EPS) * w),
            [(rows, 8 * width)] * 2 + [(8 * width,)],
            Launch.run,
        ),
        PointwiseCase("convolution", convolved(None), lambda x, w: reference_conv(x, w, length, None), inputs),
        PointwiseCase(
            "convolution of documents", convolved(documents), lambda x, w: reference_conv(x, w, length, owner), inputs
        ),
        PointwiseCase(
            "convolution and norms of heads",
            lambda x, w, state, execute: tuple(conv_heads(x, w, few, state, documents, execute=execute)),
            lambda x, w, state: reference_heads(x, w, few, state, owner),
            of_heads,
        ),
        PointwiseCase("gates", gates, reference_gates, [(rows, heads)] * 2 + [(heads,)] * 2),
    ]


def _around_attention(quick: bool, width: int) -> list[PointwiseCase]:
    # There are few tokens and many rows: fp32 rounds the angles of later tokens by more than a bound for sums.
    batch, length, heads = (2, 19, 4) if quick else (64, 64, 16)
    rotary = (_EPS, width // 2, 1e7)
    turned = [
        PointwiseCase(
            "turned heads and gates" if gated else "turned heads",
            lambda x, w, execute, gated=gated: tuple(turned_heads(x, w, *rotary, gated, execute=execute)),
            lambda x, w, gated=gated: reference_turned_heads(x, w, *rotary, gated),
            [(batch, length, heads, 2 * width if gated else width), (width,)],
        )
        for gated in (True, False)
    ]
    shapes: Shapes = [(batch, heads, length, width), (batch, length, heads, width)]
    return [*turned, PointwiseCase("times gate", times_gate, lambda y, gate: y.swapaxes(1, 2) * gate, shapes)]


def compare(pass_: PointwiseCase, dtype: mx.Dtype, execute: Callable[[Any], list[mx.array]] | None = None) -> Outcome:
    """Compare outputs and gradients of one pass with float64 on the CPU."""
    return tried(pass_.trial_case(dtype), execute or pass_.execute)


def _listed(function: Callable[..., Any]) -> Callable[..., list[mx.array]]:
    def call(*arrays: mx.array) -> list[mx.array]:
        results = function(*arrays)
        return list(results) if isinstance(results, tuple) else [results]

    return call


def rows_and_joins(quick: bool, execute: Execute = Pass.run) -> Outcome:
    """Compare passes with NumPy: rows by index, weighted sums of rows, joined arrays, and unpacked rows."""
    tokens, top_k, width = (30, 3, 64) if quick else (2048, 8, 2048)
    keys = mx.random.split(mx.random.key(1), 3)
    x = mx.random.normal((tokens * top_k, width), key=keys[0])
    weights = mx.random.normal((tokens, top_k), key=keys[1])
    place = mx.argsort(mx.random.normal((tokens * top_k,), key=keys[2])).reshape(tokens, top_k)
    matrix = mx.quantize(x, _GROUP, 4)

    def call(execute: Execute) -> list[mx.array]:
        return [
            take_rows(x, place.reshape(-1), execute=execute),
            sum_rows(x, place, weights, execute=execute),
            end_to_end([x[:7], weights, x[9]], execute=execute),
            unpack(matrix, _GROUP, 4, mx.float32, execute=execute),
        ]

    def truth() -> list[np.ndarray]:
        rows = as_float64(x)[np.array(place)]
        joined = np.concatenate([as_float64(x)[:7].ravel(), as_float64(weights).ravel(), as_float64(x)[9]])
        numbers = (np.array(matrix[0])[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(*x.shape)
        scales, biases = (as_float64(array).repeat(_GROUP, axis=1) for array in matrix[1:])
        sums = (rows * as_float64(weights)[..., None]).sum(axis=1)
        return [rows.reshape(-1, width), sums, joined, scales * numbers + biases]

    names = ("rows taken", "rows combined", "end to end", "unpacked")
    return tried(Case("rows and joins", names, call, truth, BOUNDS[mx.float32], error=relative_norm), execute)


def adam(quick: bool, dtype: mx.Dtype) -> Outcome:
    """Compare the parameter and the moments of a step of AdamW in this dtype with the formula in float64."""
    optimizer = mlx.optimizers.AdamW(0.1, bias_correction=True)
    optimizer.state["step"] = mx.array(3)
    shape = (37, 131) if quick else (4096, 1024)
    keys = mx.random.split(mx.random.key(2), 4)
    parameter, gradient, m, v = (mx.random.normal(shape, key=key).astype(dtype) for key in keys)
    v = v.square()
    step = AdamStep.of(optimizer, mx.array(0.5), mx.array(True))
    if step is None or not step.serves(parameter, gradient):
        return not_run("its pass is for CUDA, and refused its trial" if backend.device() == "cuda" else _ON_CUDA)

    def truth() -> list[np.ndarray]:
        p, g, m64, v64 = (as_float64(array) for array in (parameter, gradient, m, v))
        g, (b1, b2), rate = 0.5 * g, optimizer.betas, 0.1
        m64, v64 = b1 * m64 + (1 - b1) * g, b2 * v64 + (1 - b2) * g * g
        # The optimizer computes both corrections in fp32, where 1 - 0.999^3 keeps four digits. The pass is given them.
        first, second = (float(1 - b**optimizer.step) for b in (b1, b2))
        moved = rate / first * m64 / (np.sqrt(v64 / second) + optimizer.eps)
        return [p * (1 - rate * optimizer.weight_decay) - moved, m64, v64]

    names, arrays = ("parameter", "m", "v"), (parameter, gradient, m, v)
    case: Case[AdamStep] = Case("AdamW", names, lambda step: step(*arrays), truth, BOUNDS[dtype], error=relative_norm)
    return tried(case, step)


_ON_CUDA = "these kernels are for CUDA; MLX's operations serve here"


def checks(quick: bool) -> Iterator[Check]:
    """Each pass with a gradient in fp32 and in bf16, then those without."""
    for case in cases(quick):
        for dtype in BOUNDS:
            name = f"passes: {case.name}, {_NAMES[dtype]}"
            yield Check(name, partial(on_cuda, partial(compare, case, dtype)))
    yield Check("passes: rows, joins and packed weights", partial(on_cuda, partial(rows_and_joins, quick)))
    for dtype in BOUNDS:
        yield Check(f"passes: AdamW, {_NAMES[dtype]}", partial(on_cuda, partial(adam, quick, dtype)))


def on_cuda(run: Callable[[], Outcome]) -> Outcome:
    """Run a check of kernels that only CUDA has."""
    return run() if backend.device() == "cuda" else not_run(_ON_CUDA)
