"""Computes the load-balancing loss of a mixture's routers, from sums over tokens that each layer makes.

With E experts, f_e is the number of times that a token chose expert e, and P_e the sum of its probabilities, both
divided by the number of rows: tokens times layers, as in transformers' load_balancing_loss_func.
    load-balancing loss = E * sum over e of f_e P_e.
It is k, the number of experts that a token chooses, where the experts are used equally.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import mlx.core as mx

from ..tracing import side_outputs, trace


def watching(lengths: mx.array, width: int, *, trained: bool) -> AbstractContextManager[None]:
    """Within the context, routers add their sums to the side outputs, where those are collected.

    Of the `width` tokens of each row only the first `lengths` [B] count. Unless the sums are `trained`, they have no
    gradients and cost nothing in the backward pass. The context must enclose the whole call of mx.value_and_grad, since
    checkpointed layers run again in the backward pass.
    """
    return trace.having(routers=trace.RouterWatch(mx.arange(width) < lengths[:, None], trained))


def watched() -> bool:
    """Whether the sums of routers are collected now."""
    told = trace.current()
    return told.routers is not None and told.side_outputs is not None


def add_sums(logits: mx.array, indices: mx.array, *, sigmoid: bool) -> None:
    """Add the sums of one router, [2 E + 1] fp32, to the side outputs.

    They are the choices of each expert, the probabilities of each, and the rows, of the logits [..., E] and the chosen
    experts [..., k] of the batch or the piece that runs. The probabilities are a softmax, or sigmoids divided by their
    sum (arXiv 2412.19437, eq. 17 to 20).
    """
    watch = trace.current().routers
    assert watch is not None
    real = watch.real.reshape(-1, 1)
    logits = logits.reshape(-1, logits.shape[-1]).astype(mx.float32)
    if not watch.trained:
        logits = mx.stop_gradient(logits)
    if sigmoid:
        probabilities = mx.sigmoid(logits)
        probabilities = probabilities / (probabilities.sum(axis=-1, keepdims=True) + 1e-20)
    else:
        probabilities = mx.softmax(logits, axis=-1)
    flat = mx.stop_gradient(indices).reshape(-1, indices.shape[-1])
    choices = mx.put_along_axis(mx.zeros(logits.shape), flat, mx.array(1.0), axis=-1)
    sums = [mx.where(real, of_rows, 0.0).sum(axis=0) for of_rows in (choices, probabilities)]
    side_outputs.collect([mx.concatenate([*sums, real.sum(axis=0).astype(mx.float32)])])


def loss(sums: mx.array) -> mx.array:
    """Return the load-balancing loss of all routers, given the sum of their sums; 0 without a real token.

    Source: arXiv 2101.03961, eq. 4 to 6.
    """
    experts = sums.size // 2
    means = sums / mx.maximum(sums[-1], 1.0)
    return experts * (means[:experts] * means[experts:-1]).sum()
