"""Attention and its gradients in float64 NumPy, the reference of the tests and the self-test.

It is independent of the operator, of which it imports nothing. All arguments are NumPy arrays in the shapes of
`attention`.
"""

from __future__ import annotations

import numpy as np

NAMES = ("y", "dq", "dk", "dv", "dsinks")


def attention64(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dy: np.ndarray,
    *,
    scale: float,
    causal: bool = True,
    segments: np.ndarray | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Compute the output and the gradients of attention in float64, from the definition.

    Args are those of `attention`, and dy, the cotangent of the output. The results come by NAMES, without `dsinks`
    where there are no sinks.
    """
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    batch, key_heads, keys, _ = k.shape
    queries_a_key = q.shape[1] // key_heads
    wide_k, wide_v = (np.repeat(x, queries_a_key, axis=1) for x in (k, v))
    scores = scale * (q @ wide_k.swapaxes(-1, -2))
    visible = np.broadcast_to(_visible(q.shape[2], keys, causal, segments, window), scores.shape)
    if mask is not None:
        mask = np.broadcast_to(mask, scores.shape)
        visible = visible & (mask if mask.dtype == bool else mask > -1e30)
        if mask.dtype != bool:
            scores = scores + np.where(visible, mask, 0.0)
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64).reshape(1, -1, 1, 1)
        most = np.maximum(most, sinks)
    most = np.where(np.isfinite(most), most, 0.0)
    weights = np.exp(scores - most)
    of_sink = np.zeros_like(most) if sinks is None else np.exp(sinks - most)
    total = weights.sum(axis=-1, keepdims=True) + of_sink
    total = np.where(total == 0, 1.0, total)
    weights, of_sink = weights / total, of_sink / total
    y = weights @ wide_v
    dweights = dy @ wide_v.swapaxes(-1, -2)
    delta = (dy * y).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - delta)
    results = {"y": y, "dq": scale * dscores @ wide_k}
    of_heads = (batch, key_heads, queries_a_key, keys, -1)
    results["dk"] = (scale * dscores.swapaxes(-1, -2) @ q).reshape(of_heads).sum(axis=2)
    results["dv"] = (weights.swapaxes(-1, -2) @ dy).reshape(of_heads).sum(axis=2)
    if sinks is not None:
        results["dsinks"] = -(of_sink * delta).sum(axis=(0, 2, 3))
    return results


def _visible(queries: int, keys: int, causal: bool, segments: np.ndarray | None, window: int | None) -> np.ndarray:
    """Which keys each query sees, [1 or B, 1, TQ, TK]; the last query stands at the last key."""
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None]
    visible = np.ones((1, 1, queries, keys), bool)
    if causal:
        visible = visible & (key <= place)
    if window is not None:
        visible = visible & (key > place - window)
    if segments is not None:
        visible = visible & (segments[:, None, keys - queries :, None] == segments[:, None, None, :])
    return visible
