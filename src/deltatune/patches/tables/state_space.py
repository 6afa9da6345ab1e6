"""Replaces linear attention of mlx-lm and mlx-vlm: `ssm_update` of Mamba-2's layers, and Lightning attention's loop.

Versions read: mlx-lm 0.32.0 to 0.32.2, mlx-vlm 0.7.0 to 0.7.10.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.gated_delta.trial_case import Call
from ...ops.linear_attention import linear_attention
from ...ops.linear_attention.choice import OPERATOR
from ...ops.operator import candidates
from ...ops.segments import last_segments
from ...ops.tracing import trace
from .. import recurrence
from ..patch_record import PACKING, TRAINING, Function, Patch
from ..small_cases import BOUND, describe_difference, drawn, results
from ..whole_rows import of_a_row

WITHOUT = (
    "These layers then train with upstream's code, which is right, but needs several times as much memory, "
    "and they cannot keep packed documents separate."
)
NAME = "linear attention"
STATE = "packed documents start without a state; pass no cache with segments."


def _decodes(state: mx.array | None) -> bool:
    """Whether a call with this state is one of a decoder, and not of a layer that runs piece by piece.

    A state that is given while documents are packed, and not by a piece of the same row, raises ValueError.
    """
    told = trace.current()
    if state is not None and told.segments is not None and told.piece is None:
        raise ValueError(f"linear attention: {STATE}")
    return told.to_upstream or (state is not None and told.piece is None)


def _ssm_update(upstream: Function) -> Function:
    """Run Mamba-2's recurrence as linear attention. A decoder's call, with its state or lengths, goes to upstream."""

    @functools.wraps(upstream)
    def ssm_update(
        hidden_states: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> Any:
        if lengths is not None or _decodes(state):
            arrays = hidden_states, A_log, B, C, D, dt, dt_bias, state
            return recurrence.counted(NAME, recurrence.UPSTREAM, upstream(*arrays, time_step_limit, mask, lengths))
        # The steps are fp32, as upstream's; the values have the dtype of the states' inputs, which the kernels want.
        steps = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *time_step_limit)
        log_g = -mx.exp(A_log.astype(mx.float32)) * steps
        values = (steps[..., None] * hidden_states).astype(hidden_states.dtype)
        y, last = linear_attention(
            C,
            B,
            values,
            log_g,
            initial_state=state,
            mask=None if mask is None else mask.astype(mx.bool_),
            segments=last_segments(values.shape[1]),
        )
        result = y + hidden_states * D[:, None], last
        return recurrence.counted(NAME, recurrence.OURS, result, lambda: _implementation(C, B, values, log_g))

    return ssm_update


def _implementation(*arrays: mx.array) -> str:
    """Name the implementation of a call with these q, k, v and log_g."""
    q, k, v, log_g = of_a_row(arrays)
    return candidates.choose(OPERATOR, Call(q, k, v, log_g, masked=False, segmented=False, beta_dtype=None))[0]


def _same_update(upstream: Function, ours: Function) -> str | None:
    """Compare values and gradients, with groups, limits of the steps, and a masked beginning."""
    shapes = (1, 5, 4, 6), (4,), (1, 5, 2, 8), (1, 5, 2, 8), (4,), (1, 5, 4), (4,)
    arrays = [0.5 * drawn(at, *shape) for at, shape in enumerate(shapes)]
    for options in ({}, {"time_step_limit": (0.5, 0.9)}, {"mask": mx.arange(5)[None] > 1}):
        outputs, expected = (
            results(lambda *x, f=function, o=options: f(*x, **o), arrays) for function in (upstream, ours)
        )
        difference = describe_difference(outputs, expected, BOUND, f"deltatune's with {options}")
        if difference is not None:
            return difference
    return None


def _recurrent_gla(upstream: Function) -> Function:
    """Run Lightning attention, with one constant gate a head. A decoder's call, with its state, goes to upstream."""

    # Versions with a mask hold the state in fp32.
    masks = "mask" in inspect.signature(upstream).parameters

    @functools.wraps(upstream)
    def recurrent_gla(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        scale: float,
        h: mx.array | None = None,
        mask: mx.array | None = None,
        **options: Any,
    ) -> Any:
        if _decodes(h):
            options |= {"mask": mask} if masks else {}
            return recurrence.counted(NAME, recurrence.UPSTREAM, upstream(q, k, v, g, scale=scale, h=h, **options))
        # Upstream has heads before tokens, and a state [Dk, Dv].
        queries, keys, values = (x.swapaxes(1, 2) for x in (q, k, v))
        log_g = mx.broadcast_to(g.astype(mx.float32), values.shape[:3])
        start = None if h is None else h.swapaxes(2, 3)
        constants = {"mask": mask, "segments": last_segments(values.shape[1])}
        y, last = linear_attention(queries * scale, keys, values, log_g, initial_state=start, **constants)
        last = last.swapaxes(2, 3)
        # A piece hands its state on in fp32.
        result = y.swapaxes(1, 2), last if masks or trace.current().piece else last.astype(q.dtype)
        return recurrence.counted(NAME, recurrence.OURS, result, lambda: _implementation(queries, keys, values, log_g))

    return recurrent_gla


def _same_loop(upstream: Function, ours: Function) -> str | None:
    arrays = [*(drawn(at, 1, 2, 5, 4) for at in range(2)), drawn(2, 1, 2, 5, 6), -mx.abs(drawn(3, 2))]
    outputs, expected = (results(lambda *x, f=function: f(*x, scale=0.5), arrays) for function in (upstream, ours))
    return describe_difference(outputs, expected, BOUND, "deltatune's")


_RECORD: dict[str, Any] = {"without": WITHOUT, "needed_for": (TRAINING, PACKING)}
_UPDATE: dict[str, Any] = _RECORD | {
    "name": "ssm_update",
    "replacement": _ssm_update,
    "check": _same_update,
    "reason": "a training forward holds a matrix of 256 tokens for each head, and documents cannot restart in it",
}
_LOOP: dict[str, Any] = _RECORD | {
    "name": "recurrent_gla",
    "replacement": _recurrent_gla,
    "check": _same_loop,
    "reason": "a training forward runs a loop over tokens, with a gate rounded to the dtype of q",
}
PATCHES = (
    Patch(**_UPDATE, module="mlx_lm.models.ssm"),
    Patch(**_UPDATE, module="mlx_vlm.models.ssm"),
    Patch(**_LOOP, module="mlx_lm.models.bailing_moe_linear"),
    Patch(**_LOOP, module="mlx_lm.models.bailing_hybrid"),
)
