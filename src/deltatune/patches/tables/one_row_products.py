"""Replaces MLX's products so that no product of one row reaches a BLAS with this fault.

The patches are applied only on a CPU with a BLAS that fails the probe of machine/blas_fault.py. They pad every
dimension of 1 to 2 with zeros, so that neither a product nor the products of its gradient have one row. MLX's own
functions are replaced, which nn.Linear, attention, convolutions and layers of experts all call. `mx.einsum` and
products inside MLX's C++ code (mx.linalg) are not covered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...errors import UserError
from ...machine import backend
from ...machine.blas_fault import ProbeResult, probe
from .. import patch
from ..patch import PatchWarning
from ..patch_record import ALWAYS, Check, Function, Patch
from ..whole_rows import attending

_WITHOUT = "One-row products of this kind can return NaN on this machine."
# The faults that this process has warned of.
_warned: set[str] = set()


def records() -> tuple[Patch, ...]:
    """The patches that this machine needs: PATCHES where MLX's BLAS on a CPU fails the probe, else none.

    The first call of a process that finds the fault warns the user of it. Where products of two rows are wrong as well,
    no result can be trusted, which raises UserError.
    """
    if not backend.uses_blas():
        return ()
    result = probe()
    if not result.wrong:
        return ()
    if not result.two_rows_work:
        raise UserError(
            f"The BLAS that MLX uses computes wrong products: {result}. Nothing trained on it would be right: update "
            "it (on macOS, the system), unset DELTATUNE_BLAS, or train on a GPU."
        )
    _warn(result)
    return PATCHES


def in_force() -> bool:
    """Whether all of PATCHES are applied."""
    return all(patch.in_force(record.target) is not None for record in PATCHES)


def _warn(result: ProbeResult) -> None:
    if str(result) in _warned:
        return
    _warned.add(str(result))
    warnings.warn(
        f"The BLAS of this machine computes products of one row wrong: {result}. deltatune computes them with two rows "
        "instead; other programs may get NaN. Update the BLAS (on macOS, the system) to correct it.",
        PatchWarning,
        stacklevel=5,
    )


def _widen(x: mx.array, axes: Sequence[int]) -> mx.array:
    """Pad `x` with zeros to length 2 along each of `axes` of length 1."""
    widths = [(0, 0)] * x.ndim
    for axis in axes:
        widths[axis] = (0, int(x.shape[axis] == 1))
    return mx.pad(x, widths) if any(after for _, after in widths) else x


def _narrow(x: mx.array, rows: int, columns: int) -> mx.array:
    """Undo _widen on a product: cut its last two axes to `rows` and `columns`."""
    return x if x.shape[-2:] == (rows, columns) else x[..., :rows, :columns]


def _matmul(upstream: Function) -> Function:
    def matmul(a: Any, b: Any, /, **options: Any) -> Any:
        return _product(upstream, a, b, options)

    return matmul


def _product(upstream: Function, a: Any, b: Any, options: dict[str, Any]) -> Any:
    """a @ b, [..., M, K] x [..., K, N] or vectors, such that no dimension of `upstream`'s operands is 1."""
    if not (isinstance(a, mx.array) and isinstance(b, mx.array)) or 0 in (a.ndim, b.ndim):
        return upstream(a, b, **options)
    if a.ndim == 1:
        return _product(upstream, a[None], b, options).squeeze(-2 if b.ndim > 1 else 0)
    if b.ndim == 1:
        return _product(upstream, a, b[:, None], options).squeeze(-1)
    if a.ndim > 2 and b.ndim == 2:
        # MLX then multiplies the rows of all batches at once, so their total number decides.
        return mx.unflatten(_product(upstream, a.flatten(0, -2), b, options), 0, a.shape[:-1])
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if 1 not in (rows, inner, columns) or inner != b.shape[-2]:
        return upstream(a, b, **options)
    return _narrow(upstream(_widen(a, (-2, -1)), _widen(b, (-2, -1)), **options), rows, columns)


def _addmm(upstream: Function) -> Function:
    def addmm(c: Any, a: Any, b: Any, /, alpha: float = 1.0, beta: float = 1.0, **options: Any) -> Any:
        if not all(isinstance(x, mx.array) for x in (a, b, c)) or 0 in (a.ndim, b.ndim):
            return upstream(c, a, b, alpha=alpha, beta=beta, **options)
        rows = math.prod(a.shape[:-1] if b.ndim == 2 else a.shape[-2:-1])
        if 1 not in (rows, a.shape[-1], b.shape[-1] if b.ndim > 1 else 1):
            return upstream(c, a, b, alpha=alpha, beta=beta, **options)
        # The sum is rounded once, as in MLX's function.
        dtype = mx.result_type(a.dtype, b.dtype, c.dtype)
        c, a, b = (x.astype(mx.result_type(dtype, mx.float32)) for x in (c, a, b))
        return mx.add(alpha * mx.matmul(a, b, **options), beta * c, **options).astype(dtype)

    return addmm


def _gather_mm(upstream: Function) -> Function:
    def gather_mm(a: Any, b: Any, /, *indices: Any, **options: Any) -> Any:
        if a.ndim < 2 or b.ndim < 2 or 1 not in (*a.shape[-2:], b.shape[-1]):
            return upstream(a, b, *indices, **options)
        wide = (_widen(a, (-2, -1)), _widen(b, (-2, -1)))
        return _narrow(upstream(*wide, *indices, **options), a.shape[-2], b.shape[-1])

    return gather_mm


def _segmented_mm(upstream: Function) -> Function:
    def segmented_mm(a: Any, b: Any, /, segments: Any, **options: Any) -> Any:
        return _narrow(upstream(_widen(a, (-2,)), b, segments, **options), a.shape[-2], b.shape[-1])

    return segmented_mm


def _attention(upstream: Function) -> Function:
    def scaled_dot_product_attention(q: Any, k: Any, v: Any, *, scale: float, **options: Any) -> Any:
        if 1 not in (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]):
            return upstream(q, k, v, scale=scale, **options)
        return attention(q, k, v, scale, options.get("mask"), options.get("sinks"))

    return scaled_dot_product_attention


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Compute mx.fast.scaled_dot_product_attention with array operations, rounding as MLX does on a CPU.

    The arrays are [B, H, T, D], [B, G, S, D] and [B, G, S, E], where H is a multiple of G, and the result [B, H, T, E];
    `sinks` [H] is a score of one more position, which has no value.
    """
    heads, groups, length, keys = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    q = mx.unflatten(q * scale, 1, (groups, heads // groups))
    k, v = k[:, :, None], v[:, :, None]
    scores = mx.matmul(q, k.swapaxes(-1, -2))
    if isinstance(mask, str):
        mask = mx.arange(keys - length, keys)[:, None] >= mx.arange(keys)
    if mask is not None:
        if mask.ndim >= 3:
            per_head = mask.shape[-3] != 1
            mask = mx.unflatten(mask, -3, (groups, heads // groups)) if per_head else mx.expand_dims(mask, -3)
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        else:
            scores = scores + mask
    if sinks is not None:
        first = mx.broadcast_to(sinks.reshape(1, groups, heads // groups, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([first.astype(scores.dtype), scores], -1)
    weights = mx.softmax(scores, -1, precise=True)
    return mx.matmul(weights if sinks is None else weights[..., 1:], v).flatten(1, 2)


def _inner(upstream: Function) -> Function:
    def inner(a: Any, b: Any, /, **options: Any) -> Any:
        if 0 in (a.ndim, b.ndim) or a.shape[-1] != b.shape[-1]:
            return upstream(a, b, **options)
        product = mx.matmul(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]).T, **options)
        return product.reshape((*a.shape[:-1], *b.shape[:-1]))

    return inner


def _convolution(upstream: Function) -> Function:
    def convolution(x: Any, weight: Any, /, *arguments: Any, **options: Any) -> Any:
        y = upstream(x, weight, *arguments, **options)
        # A result of one position in one example comes from a product of one row. That y is then never evaluated.
        return y if math.prod(y.shape[:-1]) != 1 else upstream(_widen(x, (0,)), weight, *arguments, **options)[:1]

    return convolution


def _agrees(call: Function) -> Check:
    """Build a check: `call(ours, x)` on each row of x alone must give the rows of `call(upstream, x)` on both."""

    def check(upstream: Function, ours: Function) -> str | None:
        x = mx.random.normal((2, 3), key=mx.random.key(0))
        both = call(upstream, x)
        single = mx.concatenate([call(ours, x[:1]), call(ours, x[1:])])
        close = bool((mx.abs(both - single) < 1e-5).all()) and bool((mx.abs(call(ours, x) - both) < 1e-5).all())
        return None if close else "on a small case deltatune's replacement computes something else."

    return check


def _weight(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(1))


def _record(name: str, replacement: Function, call: Function) -> Patch:
    reason = "the BLAS of this machine leaves NaN in products of one row"
    return Patch("mlx.core", name, replacement, _agrees(call), reason=reason, without=_WITHOUT, needed_for=ALWAYS)


def _attended(function: Function, x: mx.array) -> mx.array:
    q = mx.stack([x, x + 1])[None]
    k = _weight(1, 1, 4, 3)
    v = _weight(1, 1, 4, 3) + 1
    return function(q, k, v, scale=0.5).swapaxes(1, 2).reshape(len(x), -1)


def _slid(*extent: int) -> Function:
    def call(function: Function, x: mx.array) -> mx.array:
        return function(x.reshape(len(x), *extent, 3), _weight(4, *extent, 3)).reshape(len(x), -1)

    return call


PATCHES = (
    _record("matmul", _matmul, lambda f, x: f(x, _weight(3, 4))),
    _record("array.__matmul__", _matmul, lambda f, x: f(x, _weight(3, 4))),
    _record("array.__imatmul__", _matmul, lambda f, x: f(x + 0, _weight(3, 3))),
    _record("addmm", _addmm, lambda f, x: f(_weight(4), x, _weight(3, 4), 0.5, 2.0)),
    _record("inner", _inner, lambda f, x: f(x, _weight(4, 3))),
    _record("gather_mm", _gather_mm, lambda f, x: f(x[None], _weight(2, 3, 4), rhs_indices=mx.array([1]))[0]),
    _record("segmented_mm", _segmented_mm, lambda f, x: f(x, _weight(3, 4), mx.array([[0, 3]], mx.uint32))[0]),
    # In training, deltatune's attention serves in its place, as on other machines (whole_rows.py).
    _record("fast.scaled_dot_product_attention", lambda upstream: attending(_attention(upstream)), _attended),
    _record("conv1d", _convolution, _slid(1)),
    _record("conv2d", _convolution, _slid(1, 1)),
    _record("conv3d", _convolution, _slid(1, 1, 1)),
)
