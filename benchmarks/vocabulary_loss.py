"""Checks the cross-entropy over the vocabulary on an NVIDIA GPU against float64, and times it with MLX's operations.

usage: python benchmarks/vocabulary_loss.py [--rows 512] [--vocabulary 248320] [--repeats 20]

The first table has the largest errors over the largest exact element: of the losses, of the targets' gradients and of
the other gradients. The second has the milliseconds of a chunk of logits in bf16, losses and gradients together, as the
best of five graphs with this many chunks one after another. GB/s count the bytes that the kernels must move: the logits
twice and the gradients once. Blocks of other sizes than the one in use are timed too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from unittest.mock import patch

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.machine import backend
from deltatune.ops.cross_entropy import _chunk_loss
from deltatune.ops.operator import measure
from deltatune.ops.operator.measure import poison
from deltatune.ops.pointwise import vocabulary_loss
from deltatune.ops.pointwise.vocabulary_loss import exact_losses, split_at_targets, vocabulary_losses
from machine import heading

# Few rows, since float64 computes on the host.
CHECKED = [(24, 248_320), (24, 50_257), (40, 1000), (40, 1001), (40, 512), (3, 12), (1, 8)]
# The bounds of the kernels' trial, with room for rows that are longer than the trial's.
BOUNDS = {dtype: 2 * bound for dtype, bound in vocabulary_loss.BOUNDS.items()}
Results = tuple[mx.array, mx.array]


def drawn(rows: int, vocabulary: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Logits and targets; the first row is near 1e4, and the second is -infinity from its middle on."""
    keys = mx.random.split(mx.random.key(vocabulary), 2)
    logits = 3 * mx.random.normal((rows, vocabulary), key=keys[0])
    targets = mx.random.randint(0, vocabulary // 2, (rows,), key=keys[1])
    logits[0] += 1e4
    if rows > 1:
        logits[1, vocabulary // 2 :] = -mx.inf
    return logits.astype(dtype), targets


def by_kernels(logits: mx.array, targets: mx.array, cotangents: mx.array) -> Results:
    (losses,), (gradients,) = mx.vjp(lambda x: vocabulary_losses(x, targets), [logits], [cotangents])
    return losses, gradients


def by_mlx(logits: mx.array, targets: mx.array, _cotangents: mx.array) -> Results:
    """As a frozen head is trained, whose logits' gradients are not multiplied by weights."""
    (_, losses), gradients = mx.value_and_grad(lambda x: _chunk_loss(x, targets, None)[:2])(logits)
    return losses, gradients


def check_errors() -> bool:
    """Print the errors of the kernels, whose outputs start as NaN. Returns whether all are within their bounds."""
    good = True
    print("| rows x vocabulary | dtype | losses | targets' gradients | other gradients | |\n" + "|---" * 6 + "|")
    for rows, vocabulary in CHECKED:
        for dtype, bound in BOUNDS.items():
            logits, targets = drawn(rows, vocabulary, dtype)
            cotangents = mx.random.normal((rows,), key=mx.random.key(1))
            poison(list(by_kernels(logits, targets, cotangents)))
            losses, gradients = by_kernels(logits, targets, cotangents)
            found = [losses, *split_at_targets(gradients, targets)]
            exact = exact_losses(logits, targets, cotangents)
            errors = [measure.relative_error(one, other) for one, other in zip(found, exact, strict=True)]
            within = max(errors) <= bound
            good = good and within
            cells = " | ".join(f"{error:.1e}" for error in errors)
            verdict = "" if within else f"over {bound:.1e}"
            print(f"| {rows} x {vocabulary:,} | {str(dtype).split('.')[-1]} | {cells} | {verdict} |")
    return good


def milliseconds(function: Callable[..., Results], logits: mx.array, targets: mx.array, repeats: int) -> float:
    """The milliseconds of one chunk, of which each waits for the one before."""
    cotangents = mx.ones(targets.shape)
    times = []
    for _ in range(6):
        start, chunk = time.perf_counter(), logits
        for _ in range(repeats):
            results = function(chunk, targets, cotangents)
            chunk = mx.depends([chunk], list(results))[0]
        mx.eval(results)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:]) / repeats


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if backend.device() != "cuda":
        sys.exit("The kernels are for NVIDIA GPUs, and MLX does not compute on one here.")
    print(f"{heading()}\n")
    good = check_errors()
    logits, targets = drawn(options.rows, options.vocabulary, mx.bfloat16)
    mx.eval(logits, targets)
    print(f"\n{options.rows} x {options.vocabulary:,}, bf16\n\n| | ms | GB/s |\n|---|---|---|")
    for groups in (8, 16, 32):
        with patch.object(vocabulary_loss, "GROUPS", groups):
            taken = milliseconds(by_kernels, logits, targets, options.repeats)
        name = f"kernels, {32 * groups} lanes a row" + (", in use" if groups == vocabulary_loss.GROUPS else "")
        print(f"| {name} | {taken:.3f} | {3 * logits.nbytes / taken / 1e6:,.0f} |")
    taken = milliseconds(by_mlx, logits, targets, options.repeats)
    print(f"| MLX's operations | {taken:.3f} | |")
    sys.exit(0 if good else "The kernels' errors are over their bounds.")


if __name__ == "__main__":
    main()
