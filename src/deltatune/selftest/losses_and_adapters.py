"""Compares the kernels of the vocabulary loss and of LoRA's products with float64, at the sizes of a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from ..ops.kernels.launch import Execute, Launch
from ..ops.pointwise.vocabulary_loss import RESULTS, differentiated, exact_losses
from ..ops.products.low_rank import add_product, both_products, columns_product, rows_product
from ..ops.trial.case import Case
from ..ops.trial.measure import as_float64, relative_norm
from .outcome import Check, Outcome, tried
from .pointwise import BOUNDS, on_cuda


def vocabulary(dtype: mx.Dtype, quick: bool, execute: Execute = Launch.run) -> Outcome:
    """Compare the losses of some tokens, and the gradients of their logits."""
    tokens, size = (9, 1001) if quick else (64, 248_320)
    keys = mx.random.split(mx.random.key(4), 3)
    logits = (3 * mx.random.normal((tokens, size), key=keys[0])).astype(dtype)
    targets = mx.random.randint(0, size, (tokens,), key=keys[1])
    cotangents = mx.random.normal((tokens,), key=keys[2])
    case: Case[Execute] = Case(
        name="vocabulary loss",
        results=RESULTS,
        call=lambda execute: differentiated(logits, targets, cotangents, execute),
        truth=lambda: exact_losses(logits, targets, cotangents),
        bound=BOUNDS[dtype],
        error=relative_norm,
    )
    return tried(case, execute)


def low_rank(quick: bool, execute: Execute | None = None) -> Outcome:
    """Compare LoRA's products in bf16."""
    rows, width, rank = (70, 136, 5) if quick else (4096, 3584, 8)
    keys = mx.random.split(mx.random.key(6), 4)
    shapes = ((rows, width), (width, rank), (rank, width), (rows, rank))
    x, a, b, d = (mx.random.normal(shape, key=key).astype(mx.bfloat16) for shape, key in zip(shapes, keys, strict=True))

    def call(execute: Execute | None) -> list[mx.array]:
        return [
            rows_product(x, a, 0.5, execute=execute),
            rows_product(x, b, 0.5, transpose=True, execute=execute),
            columns_product(x, d, 0.5, execute=execute),
            *both_products(x, d, b, 0.5, execute=execute),
            add_product(x, d, b, 0.5, execute=execute),
            add_product(x, d, a, 0.5, transpose=True, execute=execute),
        ]

    def truth() -> list[np.ndarray]:
        x64, a64, b64, d64 = (as_float64(array) for array in (x, a, b, d))
        narrow = [0.5 * product for product in (x64 @ a64, x64 @ b64.T, x64.T @ d64, x64 @ b64.T, d64.T @ x64)]
        return [*narrow, x64 + 0.5 * d64 @ b64, x64 + 0.5 * d64 @ a64.T]

    names = ("x A", "x B^T", "gradient of A", "gradient of x A", "gradient of B", "y + x A B", "gradient of x")
    return tried(Case("LoRA's products", names, call, truth, BOUNDS[mx.bfloat16], error=relative_norm), execute)


def checks(quick: bool) -> Iterator[Check]:
    """The vocabulary loss in fp32 and in bf16, and LoRA's products."""
    for dtype in BOUNDS:
        name = f"vocabulary loss, {'fp32' if dtype == mx.float32 else 'bf16'}"
        yield Check(name, partial(on_cuda, partial(vocabulary, dtype, quick)))
    yield Check("LoRA's products, bf16", partial(on_cuda, partial(low_rank, quick)))
