"""The chunkwise form of the gated delta rule in MLX's array operations, differentiated by autodiff.

It is compared with deltatune because most frameworks have such a form beside their kernels (arXiv 2406.06484,
2412.06464). It takes scalar gates, computes decays as differences of cumulative sums, and inverts the triangular matrix
by substitution in blocks.
"""

from __future__ import annotations

import mlx.core as mx

CHUNK = 64


def gated_delta_autodiff(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array) -> mx.array:
    """y [B, T, Hv, Dv] in v's dtype, from an initial state of zeros; arguments as for deltatune's gated_delta."""
    from deltatune.ops.gated_delta.triangular import blocked_inverse

    batch, length, value_heads, value_size = v.shape
    repeats = value_heads // k.shape[2]
    chunks = -(-length // CHUNK)

    def chunked(x: mx.array) -> mx.array:
        x = mx.pad(x.astype(mx.float32), [(0, 0), (0, chunks * CHUNK - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, chunks, CHUNK, *x.shape[2:])
        return x.transpose(1, 0, 3, 2, *range(4, x.ndim))

    q, k = (mx.repeat(x, repeats, axis=2) for x in (q, k))
    wide_q, wide_k, wide_v = chunked(q), chunked(k), chunked(v)
    gates, betas = mx.cumsum(chunked(log_g), axis=-1), chunked(beta)[..., None]
    lower = mx.tri(CHUNK)
    spans = mx.where(lower.astype(mx.bool_), gates[..., :, None] - gates[..., None, :], -mx.inf)
    decay = mx.exp(spans)
    keys = wide_k.swapaxes(-1, -2)
    inverse = blocked_inverse(betas * (wide_k @ keys) * decay * mx.tri(CHUNK, k=-1))
    solve = inverse * betas.swapaxes(-1, -2)
    written, removed = solve @ wide_v, solve @ (wide_k * mx.exp(gates)[..., None])
    scores = (wide_q @ keys) * decay
    recalled = wide_q * mx.exp(gates)[..., None]
    kept = wide_k * mx.exp(gates[..., -1:] - gates)[..., None]
    total = mx.exp(gates[..., -1])[..., None, None]

    state = mx.zeros((batch, value_heads, k.shape[-1], value_size))
    outputs = []
    for n in range(chunks):
        delta = written[n] - removed[n] @ state
        outputs.append(recalled[n] @ state + scores[n] @ delta)
        state = state * total[n] + kept[n].swapaxes(-1, -2) @ delta
    y = mx.stack(outputs, axis=1).swapaxes(2, 3).reshape(batch, chunks * CHUNK, value_heads, value_size)
    return y[:, :length].astype(v.dtype)
