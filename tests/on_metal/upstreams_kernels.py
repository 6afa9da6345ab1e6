"""Kernels of upstream's that a forward pass on Metal reaches, computed by array operations.

They refuse a gradient in MLX's own words; any other one raises.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

# In MLX's words.
NO_GRADIENT = "[Primitive::vjp] Not implemented for CustomKernel."


def kernel(name: str) -> Callable[..., list[mx.array]]:
    """Stand in for mx.fast.metal_kernel."""
    compute = next((function for start, function in _COMPUTED.items() if name.startswith(start)), None)

    def call(*, inputs: list[Any], output_dtypes: list[mx.Dtype], **_: Any) -> list[mx.array]:
        if compute is None:
            raise NotImplementedError(f"tests/on_metal/upstreams_kernels.py computes no kernel named {name}.")
        places = [place for place, value in enumerate(inputs) if isinstance(value, mx.array)]

        def forward(*arrays: mx.array) -> tuple[mx.array, ...]:
            given = list(inputs)
            for place, value in zip(places, arrays, strict=True):
                given[place] = value
            return tuple(out.astype(kind) for out, kind in zip(compute(*given), output_dtypes, strict=True))

        def refuse(*_: Any) -> None:
            raise ValueError(NO_GRADIENT)

        function: Any = mx.custom_function(forward)
        function.vjp(refuse)
        return list(function(*[inputs[place] for place in places]))

    return call


def _gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, _: int, mask: Any = None
) -> tuple[mx.array, mx.array]:
    repeats = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(each.astype(mx.float32), repeats, axis=2) for each in (q, k))
    state, outputs = state.astype(mx.float32), []
    for t in range(q.shape[1]):
        decay = g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None]
        after = state * decay
        change = (v[:, t] - (after * k[:, t, :, None]).sum(-1)) * beta[:, t, :, None]
        after = after + k[:, t, :, None] * change[..., None]
        output = (after * q[:, t, :, None]).sum(-1)
        if mask is not None:
            kept = mask[:, t, None, None]
            after, output = mx.where(kept[..., None], after, state), mx.where(kept, output, 0)
        state = after
        outputs.append(output)
    return mx.stack(outputs, axis=1), state


def _rotation(x: mx.array, position_ids: mx.array, inv_freq: mx.array, selector: mx.array) -> tuple[mx.array]:
    half = inv_freq.shape[0]
    positions = position_ids[..., None]
    if position_ids.ndim == 3:
        positions = mx.take(position_ids, selector, axis=0).transpose(1, 2, 0)
    angle = (positions.astype(mx.float32) * inv_freq)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = mx.cos(angle), mx.sin(angle)
    return (mx.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1),)


def _residual_mix(
    raw: mx.array, inverse_rms: mx.array, partial: mx.array, weight: mx.array, eps: mx.array, _: int
) -> tuple[mx.array]:
    raw, newest = raw.astype(mx.float32), partial.astype(mx.float32)
    of_blocks = (raw * weight).sum(axis=-1) * inverse_rms.reshape(raw.shape[:-1])
    of_newest = (newest * weight).sum(axis=-1) * mx.rsqrt(newest.square().mean(axis=-1) + eps[0])
    shares = mx.softmax(mx.concatenate([of_blocks, of_newest[None]]), axis=0)[..., None]
    return ((shares * mx.concatenate([raw, newest[None]])).sum(axis=0),)


_COMPUTED: dict[str, Callable[..., tuple[mx.array, ...]]] = {
    "gated_delta_step": _gated_delta,
    "mrope_apply_half_split": _rotation,
    "attnres_mix": _residual_mix,
}
