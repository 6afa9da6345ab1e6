"""The cross-entropy of logits over the vocabulary, as one kernel that reads them, and one that writes their gradients.

MLX's operations would cast a chunk's logits to fp32, and pass over the fp32 numbers five times.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...machine import backend
from ..kernels.launch import Arrays, Execute, Launch, Outputs, Values
from ..trial import measure
from .passes import BOUNDS, LEAST

# Groups of 32 lanes for a row.
GROUPS = 16


def vocabulary_losses(logits: mx.array, targets: mx.array, *, execute: Execute = Launch.run) -> mx.array:
    """Return the cross-entropies of `logits`, [n] fp32 in nats, computed in fp32; gradients reach `logits`.

    Args:
        logits: [n, V] floats.
        targets: [n] integers from 0 to V - 1.
        execute: runs a launch; tests run it on the host machine.
    """
    return _function(execute)(logits, targets.astype(mx.int32))[0]


def serves(logits: mx.array) -> bool:
    """Whether the kernels are to be used for these logits: they cover them, are faster, and were found right here."""
    if backend.device() != "cuda" or logits.ndim != 2 or logits.size < LEAST:
        return False
    return logits.dtype in BOUNDS and _passes_trial(logits.dtype)


@cache
def _function(execute: Execute) -> Any:
    """Return the function (logits, targets) -> losses, shifts, sums, where only the losses pass a gradient on."""
    function: Any = mx.custom_function(lambda logits, targets: execute(_forward(logits, targets)))

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        logits, targets = primals
        _, shifts, sums = outputs
        (d_logits,) = execute(_backward(logits, targets, shifts, sums, cotangents[0]))
        return [d_logits, mx.zeros_like(targets)]

    function.vjp(vjp)
    return function


def _forward(logits: mx.array, targets: mx.array) -> Launch:
    outputs: Outputs = dict.fromkeys(("losses", "shifts", "sums"), (targets.shape, mx.float32))
    return _launch("vocabulary_losses", {"logits": logits, "targets": targets}, outputs)


def _backward(logits: mx.array, targets: mx.array, shifts: mx.array, sums: mx.array, cotangents: mx.array) -> Launch:
    inputs = {"logits": logits, "targets": targets, "shifts": shifts, "sums": sums, "cotangents": cotangents}
    return _launch("vocabulary_gradients", inputs, {"d_logits": (logits.shape, logits.dtype)})


def _launch(name: str, inputs: Arrays, outputs: Outputs) -> Launch:
    values: Values = {"GROUPS": GROUPS}
    order, sizes, blocks = tuple(values), ("logits_shape[1]",), (inputs["logits"].shape[0], 1, 1)
    return Launch(
        name, "VocabularyMemory", inputs, outputs, values, order, order, blocks, 8 * GROUPS, GROUPS, sizes=sizes
    )


@cache
def _passes_trial(dtype: mx.Dtype, execute: Execute = Launch.run) -> bool:
    """Try the kernels on rows that start on 16 bytes and on rows that do not."""

    def difference() -> float:
        return max(_error(vocabulary, dtype, execute) for vocabulary in (33_000, 33_001))

    return measure.passes(f"the cross-entropy of {dtype}", difference, BOUNDS[dtype])


def _error(vocabulary: int, dtype: mx.Dtype, execute: Execute) -> float:
    """The largest error of losses and gradients against float64, since MLX's sums of so many terms are less exact."""
    (logits, cotangents) = measure.random_arrays([((9, vocabulary), dtype), ((9,), mx.float32)])
    targets = mx.arange(9) * (vocabulary // 9)
    losses, gradients = mx.vjp(lambda x: vocabulary_losses(x, targets, execute=execute), [logits], [cotangents])
    exact = exact_losses(logits, targets, cotangents)
    return measure.largest_error(
        [*losses, *split_at_targets(np.array(gradients[0].astype(mx.float32)), targets)], exact
    )


def exact_losses(logits: mx.array, targets: mx.array, cotangents: mx.array) -> list[np.ndarray]:
    """Return the losses in float64, and the gradients of the logits as `split_at_targets` returns them."""
    wide = np.array(logits.astype(mx.float32), np.float64)
    chosen = np.arange(len(wide)), np.array(targets)
    wide -= wide.max(axis=-1, keepdims=True)
    exponentials = np.exp(wide)
    sums = exponentials.sum(axis=-1, keepdims=True)
    gradients = exponentials / sums
    gradients[chosen] -= 1
    gradients *= np.array(cotangents, np.float64)[:, None]
    return [np.log(sums[:, 0]) - wide[chosen], *split_at_targets(gradients, targets)]


def split_at_targets(gradients: np.ndarray, targets: mx.array) -> list[np.ndarray]:
    """Return the targets' gradients, and all gradients with zeros there: the others are far smaller than a target's."""
    chosen, others = (np.arange(len(gradients)), np.array(targets)), gradients.copy()
    others[chosen] = 0
    return [gradients[chosen], others]
