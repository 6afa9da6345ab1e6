"""Checks the passes around attention on an NVIDIA GPU against float64, and times them with the operations before them.

usage: python benchmarks/attention_heads.py [--calls 24] [--sweep]

The first table has the largest errors over the largest exact element, of outputs whose memory was filled with NaN; its
bounds grow with the tokens, since fp32 rounds an angle by 2^-23 of it. The second has the microseconds of a call among
many in one graph, on [2, 2048] tokens in bf16 with 8 query heads and 2 key heads of 256, 64 of which turn: the forward
pass, the backward pass, and both; in brackets the bandwidth by the bytes that must move. "All" is what surrounds the
attention of a layer, without attention: "in steps" by a kernel for the queries' norm and the gate, one for the keys'
norm, MLX's rotary embedding, the copies that attention needs, and a product. --sweep times other heads a lane.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.machine import backend
from deltatune.ops.pointwise import heads, norm_and_gate, times_gate, turned_heads
from deltatune.ops.pointwise.weighted_norms import weighted_norm
from machine import heading
from pass_checks import Arrays, Function, drawn, errors, microseconds
from pass_definitions import reference_turned_heads

BATCH, TOKENS, QUERIES, KEYS, WIDTH = 2, 2048, 8, 2, 256
EPS, ROTARY, BASE = 1e-6, 64, 1e7
# Rounding to the dtype, and what fp32 sums of 256 terms cost; MLX's gradient of the weight sums over all tokens.
BOUNDS = {mx.float32: 4e-6, mx.bfloat16: 2.0**-8}
ANGLE = 2.0**-23


@cache
def weight() -> mx.array:
    """The weight of both norms: the same array at every call."""
    made = drawn([(WIDTH,)], seed=9)[0]
    mx.eval(made)
    return made


def queries(x: mx.array, weight: mx.array) -> Arrays:
    return turned_heads(x, weight, EPS, ROTARY, BASE, True)


def keys(x: mx.array, weight: mx.array) -> Arrays:
    return turned_heads(x, weight, EPS, ROTARY, BASE, False)


def product(y: mx.array, gate: mx.array) -> Arrays:
    return [times_gate(y, gate)]


def in_one_pass(both: mx.array, key_rows: mx.array, y: mx.array) -> Arrays:
    turned, gate = queries(both, weight())
    return [turned, *keys(key_rows, weight()), *product(y, gate)]


def in_steps(both: mx.array, key_rows: mx.array, y: mx.array) -> Arrays:
    normed, gate = norm_and_gate(both, weight(), EPS)
    normed_keys = weighted_norm(key_rows, weight(), EPS)
    turned = [
        mx.fast.rope(rows.swapaxes(1, 2), ROTARY, traditional=False, base=BASE, scale=1.0, offset=0)
        for rows in (normed, normed_keys)
    ]
    return [*map(mx.contiguous, turned), y.swapaxes(1, 2) * gate]


def check(name: str, ours: Function, exact: Function, arrays: Arrays) -> bool:
    """Print the errors of the outputs and gradients of one case; return whether they are within the bounds."""
    dtype, tokens = arrays[0].dtype, max(arrays[0].shape[1:3])
    found = errors(ours, exact, arrays)
    bound = BOUNDS[dtype] + ANGLE * tokens
    good = all(error <= bound for error in found)
    cells = " ".join(f"{error:.1e}" for error in found)
    kind = f"{name}, {str(dtype).split('.')[-1]}, {tokens} tokens"
    print(f"| {kind} | {cells} | {bound:.1e} | {'' if good else 'over'} |", flush=True)
    return good


def check_all() -> bool:
    good = []
    for dtype, tokens in ((mx.bfloat16, 149), (mx.float32, 149), (mx.float32, 6001)):
        rows = drawn([(1, tokens, KEYS, WIDTH), (WIDTH,)], dtype)
        gated = drawn([(BATCH, tokens, QUERIES, 2 * WIDTH), (WIDTH,)], dtype)
        reference = [lambda x, w, g=g: list(reference_turned_heads(x, w, EPS, ROTARY, BASE, g)) for g in (False, True)]
        good.append(check("keys", keys, reference[0], rows))
        if tokens < 1000:
            good.append(check("queries and gates", queries, reference[1], gated))
    arrays = drawn([(BATCH, QUERIES, 149, WIDTH), (BATCH, 149, QUERIES, WIDTH)])
    good.append(check("product", product, lambda y, gate: [y.swapaxes(1, 2) * gate], arrays))
    return all(good)


def timed(function: Function, shapes: list[tuple[int, ...]], calls: int) -> list[float]:
    """Microseconds of the forward pass, of the backward pass, and of both."""
    given = [drawn(shapes, seed=seed) for seed in range(4)]
    d = drawn([y.shape for y in function(*given[0])], seed=8)
    mx.eval(given, d)

    def forward() -> Iterator[mx.array]:
        for i in range(calls):
            yield from function(*given[i % len(given)])

    def gradients(with_outputs: bool) -> Iterator[mx.array]:
        for i in range(calls):
            outputs, found = mx.vjp(function, given[i % len(given)], d)
            # Attention's gradient needs its cotangent in order; the kernels give it so.
            yield from [*map(mx.contiguous, found), *(outputs if with_outputs else [])]

    return [microseconds(each, calls) for each in (forward, lambda: gradients(False), lambda: gradients(True))]


def line(name: str, function: Function, shapes: list[tuple[int, ...]], moved: tuple[int, int], calls: int) -> str:
    """A row of the second table. `moved` is how many bytes the forward and the backward pass must move."""
    found = timed(function, shapes, calls)
    cells = [f"{us:.1f} ({n / us / 1e6:.1f} TB/s)" for us, n in zip(found, (*moved, sum(moved)), strict=True)]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if backend.device() != "cuda":
        sys.exit("The kernels are for NVIDIA GPUs, and MLX does not compute on one here.")
    print(f"{heading()}\n\n| | errors of outputs and gradients | bound | |\n|---|---|---|---|", flush=True)
    good = check_all()
    print("\n| | forward | backward | both |\n|---|---|---|---|", flush=True)
    size = 2 * BATCH * TOKENS * WIDTH
    both, rows, output, gate = (
        (BATCH, TOKENS, QUERIES, 2 * WIDTH),
        (BATCH, TOKENS, KEYS, WIDTH),
        (BATCH, QUERIES, TOKENS, WIDTH),
        (BATCH, TOKENS, QUERIES, WIDTH),
    )
    parts = {
        "queries and gates": (lambda x: queries(x, weight()), [both], (4 * QUERIES * size, 6 * QUERIES * size)),
        "keys": (lambda x: keys(x, weight()), [rows], (2 * KEYS * size, 3 * KEYS * size)),
        "product": (product, [output, gate], (3 * QUERIES * size, 5 * QUERIES * size)),
    }
    moved = tuple(sum(part[2][i] for part in parts.values()) for i in range(2))
    for name, function in (("all, in one pass each", in_one_pass), ("all, in steps", in_steps)):
        parts[name] = (function, [both, rows, output], moved)
    for name, (function, shapes, count) in parts.items():
        print(line(name, function, shapes, count, options.calls), flush=True)
    for most in (1, 2, 4, 8) if options.sweep else ():
        with patch.object(heads, "MOST_HEADS", most):
            for name in ("queries and gates", "keys"):
                print(line(f"{name}, up to {most} heads a lane", *parts[name], options.calls), flush=True)
    sys.exit(0 if good else "The kernels' errors are over their bounds.")


if __name__ == "__main__":
    main()
