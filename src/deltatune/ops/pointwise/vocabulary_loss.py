"""The cross-entropy of logits over the vocabulary, as one kernel for the losses, and one for the gradients.

MLX's operations would cast a chunk's logits to fp32, and pass over the fp32 numbers five times.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..functional import with_gradient
from ..kernels.launch import Arrays, Device, Kernel, Outputs, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload, in_each_dtype
from ..operator.measure import as_float64, random_arrays
from .passes import BOUNDS, LEAST

# Groups of 32 lanes for a row.
GROUPS = 16
FILES = ("passes/exponentials.h", "passes/vocabulary_loss.h")
LOSSES = Kernel(
    name="vocabulary_losses",
    files=FILES,
    values=("GROUPS",),
    sizes=("logits_shape[1]",),
    arrays=("logits", "targets", "losses", "shifts", "sums"),
    memory="VocabularyMemory",
    memory_values=("GROUPS",),
)
GRADIENTS = replace(
    LOSSES,
    name="vocabulary_gradients",
    arrays=("logits", "targets", "shifts", "sums", "cotangents", "d_logits"),
)


def vocabulary_losses(logits: mx.array, targets: mx.array) -> mx.array:
    """Return the cross-entropies [n] fp32, in nats, of logits [n, V] and targets [n]; gradients reach the logits."""
    return _function()(logits, targets.astype(mx.int32))[0]


def serves(logits: mx.array) -> bool:
    """Whether the kernels are to be used for these logits: they cover them, are faster, and were found right here."""
    fits = logits.ndim == 2 and logits.size >= LEAST and logits.dtype in BOUNDS
    return fits and OPERATOR.serves(logits.dtype)


@cache
def _function() -> Any:
    """Return the function (logits, targets) -> losses, shifts, sums, where only the losses pass a gradient on."""

    def forward(logits: mx.array, targets: mx.array) -> list[mx.array]:
        outputs: Outputs = dict.fromkeys(("losses", "shifts", "sums"), (targets.shape, mx.float32))
        return _launch(LOSSES, {"logits": logits, "targets": targets}, outputs)

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        logits, targets = primals
        _, shifts, sums = outputs
        inputs = {"logits": logits, "targets": targets, "shifts": shifts, "sums": sums, "cotangents": cotangents[0]}
        (d_logits,) = _launch(GRADIENTS, inputs, {"d_logits": (logits.shape, logits.dtype)})
        return [d_logits, mx.zeros_like(targets)]

    return with_gradient(forward, vjp)


def _launch(kernel: Kernel, inputs: Arrays, outputs: Outputs) -> list[mx.array]:
    blocks = (inputs["logits"].shape[0], 1, 1)
    return kernel(inputs, Plan(outputs=outputs, values={"GROUPS": GROUPS}, blocks=blocks, groups=GROUPS))


def trial_case(dtype: mx.Dtype, tokens: int = 9, sizes: tuple[int, ...] = (33_000, 33_001)) -> Case[Device]:
    """Return the case of logits of this dtype: rows aligned to 16 bytes, and unaligned ones.

    Its truth is in float64, since MLX's sums of so many terms are less exact.
    """
    drawn = []
    for size in sizes:
        logits, cotangents = random_arrays([((tokens, size), dtype), ((tokens,), mx.float32)])
        drawn.append((logits, mx.arange(tokens) * (size // tokens), cotangents))
    return Case(
        name=f"the cross-entropy of {dtype}",
        results=[f"{name} of {size}" for size in sizes for name in RESULTS],
        call=by_kernels(lambda: [result for arrays in drawn for result in differentiated(*arrays)]),
        truth=lambda: [result for arrays in drawn for result in exact_losses(*arrays)],
        bound=BOUNDS[dtype],
        like=[array for logits, _, cotangents in drawn for array in (logits, cotangents)],
    )


# The results of `differentiated` and `exact_losses`.
RESULTS = ("losses", "targets' gradients", "other gradients")


def differentiated(logits: mx.array, targets: mx.array, cotangents: mx.array) -> list[mx.array]:
    """Return the losses, and the gradients of the logits as split_at_targets returns them, not computed yet."""
    losses, (gradients,) = mx.vjp(lambda x: vocabulary_losses(x, targets), [logits], [cotangents])
    return [*losses, *split_at_targets(gradients, targets)]


def split_at_targets(gradients: mx.array, targets: mx.array) -> list[mx.array]:
    """Return the targets' gradients, and all gradients with zeros there: the others are far smaller than a target's."""
    # Taking by index would have MLX build kernels on CUDA, for ten seconds.
    chosen, zero = mx.arange(gradients.shape[1]) == targets[:, None], mx.zeros((), gradients.dtype)
    return [mx.where(chosen, gradients, zero).sum(axis=1), mx.where(chosen, zero, gradients)]


def exact_losses(logits: mx.array, targets: mx.array, cotangents: mx.array) -> list[np.ndarray]:
    """Return the results of `differentiated`, in float64."""
    wide = as_float64(logits)
    chosen = np.arange(len(wide)), np.array(targets)
    wide -= wide.max(axis=-1, keepdims=True)
    exponentials = np.exp(wide)
    sums = exponentials.sum(axis=-1, keepdims=True)
    gradients = exponentials / sums
    gradients[chosen] -= 1
    gradients *= as_float64(cotangents)[:, None]
    of_targets = gradients[chosen]
    gradients[chosen] = 0
    return [np.log(sums[:, 0]) - wide[chosen], of_targets, gradients]


def _workloads(quick: bool) -> list[KernelWorkload]:
    sizes = (9, (1001,)) if quick else (64, (248_320,))
    return in_each_dtype("vocabulary loss", trial_case, *sizes)


OPERATOR = KernelOperator("losses", trial_case, workloads=_workloads)
