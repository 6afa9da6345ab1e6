"""Checks the convolution, silu and norms of a gated-delta layer on an NVIDIA GPU against float64, and times them.

usage: python benchmarks/conv_heads.py [--calls 24] [--sweep]

The first table has the largest errors over the largest exact element, of outputs whose memory was filled with NaN. The
second has the microseconds of a call among many in one graph, on [2, 2048] tokens in bf16, each of which reads another
x: the forward pass, the backward pass, and both. In brackets is the bandwidth by the bytes that must move: x and y
forward; x, dy and dx backward. "In steps" is the path of layers that this pass does not serve: the state joined to x,
the convolution with silu, a split, the norms of q and k, and a copy of v. --sweep times other ways along
the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import pass_checks
import processes
from deltatune.machine import backend
from deltatune.ops.pointwise import conv, conv_heads, conv_silu, norm
from deltatune.ops.pointwise.conv import NormedHeads, Walk
from machine import heading
from pass_checks import Arrays
from pass_definitions import reference_heads

TAPS, CHECKED, BATCH, TOKENS = 4, 149, 2, 2048
# Heads, their size and value channels: the 0.8B shape, 16 and 32 heads, and other sizes of a head.
SHAPES = {"16/16 x 128": (16, 128, 2048), "16/32 x 128": (16, 128, 4096)}
OTHERS = {"8/8 x 64": (8, 64, 512), "6/6 x 96": (6, 96, 576), "4/4 x 256": (4, 256, 1024)}
# Rounding to the dtype, and what fp32 sums of 256 terms cost; MLX's gradient of the weight rounds several times more.
BOUNDS = {mx.float32: 4e-6, mx.bfloat16: 2.0**-8}
BOUND_OF_WEIGHT = {mx.float32: 1e-5, mx.bfloat16: 2.0**-5}
# Tokens of a lane, rows ahead, and resident blocks forward and backward.
SWEEP = [(8, 3, 4, 3), (16, 2, 4, 3), (16, 3, 5, 4), (16, 4, 4, 3), (32, 2, 4, 3), (32, 3, 4, 3), (64, 3, 4, 3)]
NAMES = ("q", "k", "v", "dx", "dweight", "dstate")


@dataclass(frozen=True)
class Layer:
    """The channels of a layer, and the norms of its queries and keys."""

    count: int
    size: int
    values: int

    @property
    def heads(self) -> NormedHeads:
        return NormedHeads(self.count, self.size, 1 / self.size, self.size**-0.5, 1e-6 / self.size)

    @property
    def channels(self) -> int:
        return 2 * self.count * self.size + self.values

    def drawn(self, tokens: int, dtype: mx.Dtype, seed: int = 0) -> Arrays:
        """x, the weight, and a state."""
        shapes = [(BATCH, tokens, self.channels), (self.channels, TAPS), (BATCH, TAPS - 1, self.channels)]
        return pass_checks.drawn(shapes, dtype, seed)

    def in_one_pass(self, x: mx.array, weight: mx.array) -> Arrays:
        return conv_heads(x, weight, self.heads)

    def in_steps(self, x: mx.array, weight: mx.array) -> Arrays:
        heads, zeros = self.heads, mx.zeros((BATCH, TAPS - 1, self.channels), x.dtype)
        y = conv_silu(mx.concatenate([zeros, x], axis=1), weight)
        q, k, v = mx.split(y, [heads.channels, 2 * heads.channels], axis=-1)
        q, k = (part.reshape(*x.shape[:2], heads.count, heads.size) for part in (q, k))
        q, k = norm(q, heads.query_factor, heads.eps), norm(k, heads.key_factor, heads.eps)
        return [q, k, mx.contiguous(v)]


def errors(layer: Layer, dtype: mx.Dtype, documents: bool) -> dict[str, float]:
    """The errors of outputs and gradients on a few tokens, with a state and, if asked, several documents."""
    owner = np.searchsorted([1, 4, 40, 90], np.arange(CHECKED), side="right") if documents else None
    segments = None if owner is None else mx.broadcast_to(mx.array(owner.astype(np.int32)), (BATCH, CHECKED))

    def ours(x: mx.array, weight: mx.array, state: mx.array) -> Arrays:
        return conv_heads(x, weight, layer.heads, state, segments)

    def exact(x: mx.array, weight: mx.array, state: mx.array) -> Arrays:
        return list(reference_heads(x, weight, layer.heads, state, owner))

    return dict(zip(NAMES, pass_checks.errors(ours, exact, layer.drawn(CHECKED, dtype)), strict=True))


def check(name: str, layer: Layer, dtype: mx.Dtype, documents: bool) -> bool:
    """Print the errors of one shape; return whether they are within the bounds."""
    found = errors(layer, dtype, documents)
    over = [n for n, e in found.items() if not e <= (BOUND_OF_WEIGHT if n == "dweight" else BOUNDS)[dtype]]
    cells = " | ".join(f"{error:.1e}" for error in found.values())
    kind = f"{str(dtype).split('.')[-1]}{', documents' * documents}"
    print(f"| {name}, {kind} | {cells} | {'over: ' + ', '.join(over) if over else ''} |", flush=True)
    return not over


def timed(layer: Layer, function: Callable[[mx.array, mx.array], Arrays], calls: int) -> list[float]:
    """Microseconds of the forward pass, of the backward pass, and of both."""
    xs = [layer.drawn(TOKENS, mx.bfloat16, seed)[0] for seed in range(8)]
    weight = layer.drawn(8, mx.bfloat16)[1]
    d = [mx.random.normal(y.shape).astype(y.dtype) for y in function(xs[0], weight)]
    mx.eval(xs, weight, d)

    def forward() -> Iterator[mx.array]:
        for i in range(calls):
            yield from function(xs[i % len(xs)], weight)

    def gradients(with_outputs: bool) -> Iterator[mx.array]:
        for i in range(calls):
            outputs, (dx,) = mx.vjp(lambda x: function(x, weight), [xs[i % len(xs)]], d)
            yield from [dx, *outputs] if with_outputs else [dx]

    passes = (forward, lambda: gradients(False), lambda: gradients(True))
    return [pass_checks.microseconds(each, calls) for each in passes]


def line(name: str, layer: Layer, function: Callable[[mx.array, mx.array], Arrays], calls: int) -> str:
    found = timed(layer, function, calls)
    size = 2 * BATCH * TOKENS * layer.channels
    cells = [f"{us:.0f} ({n * size / us / 1e6:.1f} TB/s)" for us, n in zip(found, (2, 3, 5), strict=True)]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if backend.device() != "cuda":
        sys.exit("The kernels are for NVIDIA GPUs, and MLX does not compute on one here.")
    print(f"{heading()}\n\n| heads | {' | '.join(NAMES)} | |\n{'|---' * (len(NAMES) + 2)}|", flush=True)
    shapes = {name: Layer(*sizes) for name, sizes in (OTHERS | SHAPES).items()}
    # Each kind of call is checked at one shape or more; all together would take a minute to compile.
    checked = [check(name, shapes[name], mx.float32, True) for name in OTHERS]
    checked += [check(name, shapes[name], mx.bfloat16, name == "16/32 x 128") for name in SHAPES]
    print("\n| | forward | backward | both |\n|---|---|---|---|", flush=True)
    for name in SHAPES:
        layer = shapes[name]
        print(line(f"{name}, one pass", layer, layer.in_one_pass, options.calls), flush=True)
        print(line(f"{name}, in steps", layer, layer.in_steps, options.calls), flush=True)
    for rows, ahead, *resident in SWEEP if options.sweep else []:
        layer, (one, other) = shapes["16/16 x 128"], (Walk(rows, ahead, blocks) for blocks in resident)
        with patch.object(conv, "FORWARD", one), patch.object(conv, "BACKWARD", other):
            name = f"{rows} rows, {ahead} ahead, {resident[0]} and {resident[1]} blocks"
            print(line(name, layer, layer.in_one_pass, options.calls), flush=True)
    sys.exit(0 if all(checked) else "The kernels' errors are over their bounds.")


if __name__ == "__main__":
    main()
