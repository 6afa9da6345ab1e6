"""The public operator `linear_attention`.

It checks its arguments and hands them to the implementation that choice.py selects for the call.
"""

from __future__ import annotations

import mlx.core as mx

from ..gated_delta.op import check
from ..gated_delta.trial_case import Call
from ..operator import candidates
from .choice import OPERATOR


def linear_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Run linear attention with gates over a sequence, differentiable in every floating-point argument.

    Each token updates a state S and reads it: S = S diag(exp(log_g)) + v k^T; y = S q. It is the state-space duality
    of Mamba-2 with q = C, k = B, v = dt x and log_g = dt A, Lightning attention with a constant gate a head, and gated
    linear attention with a gate a channel.

    Args:
        q: Queries [B, T, Hk, Dk] in fp32, fp16 or bf16, already scaled. T is at least 1.
        k: Keys [B, T, Hk, Dk].
        v: Values [B, T, Hv, Dv]. Hv is a multiple of Hk, and value head h reads key head h // (Hv / Hk).
        log_g: Natural logarithms of the gates, in [-inf, 0]: [B, T, Hv] for one gate per head, or [B, T, Hv, Dk] for
            one gate per key channel.
        initial_state: The state [B, Hv, Dv, Dk] before the first token of the first segment. None means zeros.
        mask: [B, T] booleans. A step that is False leaves the state unchanged and gives y = 0; its inputs must be
            finite.
        segments: [B, T] integers that never decrease along T. The state restarts from zero wherever they change.

    Returns:
        y [B, T, Hv, Dv] in q's dtype, and the final state [B, Hv, Dv, Dk] in fp32.

    Raises:
        ValueError: An argument has a wrong shape or dtype (the message names it), or mx.vmap maps a call that the fused
            kernels serve. The values of log_g and segments are not checked.
        NotImplementedError: A second derivative is taken.
        UserError: DELTATUNE_LINEAR_ATTENTION forces an implementation that cannot serve this call.

    Source:
        arXiv 2405.21060 (state-space duality), arXiv 2312.06635 (a gate per key channel), and the README.md of the
        folder gated_delta with X = I and W = 0.

    Example:
        >>> q, k = (mx.random.normal((1, 8, 1, 16)) for _ in range(2))
        >>> v, log_g = mx.random.normal((1, 8, 4, 8)), mx.full((1, 8, 4), -0.1)
        >>> y, state = linear_attention(q, k, v, log_g)
        >>> y.shape, state.shape
        ((1, 8, 4, 8), (1, 4, 8, 16))
    """
    check("linear_attention", {"q": q, "k": k, "v": v, "log_g": log_g}, initial_state, mask, segments)
    _, function = candidates.choose(OPERATOR, Call(q, k, v, log_g, mask is not None, segments is not None, None))
    return function(q, k, v, log_g, initial_state=initial_state, mask=mask, segments=segments)
