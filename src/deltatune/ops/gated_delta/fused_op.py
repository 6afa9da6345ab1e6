"""The operators by the fused kernels: which calls they support, and how a machine divides one (tiling.py)."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx

from ...machine import backend
from ..functional import without_vmap
from ..recomputation import input_of, recomputes
from .fused_hopper import HopperTiling, choose_hopper_tiling
from .fused_passes import FusedPasses, TilingOfCall, keeping, recomputing, shape_of
from .fused_pieces import FusedPieces, cut_of, recomputing_pieces
from .tiling import Shape, Tiling, choose_tiling
from .transforms import operator_name

# Smaller head sizes waste most of a 16 x 16 tile.
_SMALLEST_HEAD = 4


def gated_delta_fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array | None,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
    tiling_of_call: TilingOfCall | None = None,
) -> tuple[mx.array, mx.array]:
    """Run the fused kernels: two launches forward and two backward. Arguments and results are those of `gated_delta`.

    Without `beta` they are those of `linear_attention`. `tiling_of_call` chooses how a call is divided, by default on
    MLX's device. A call that the kernels do not support or that mx.vmap maps raises ValueError, and a second derivative
    NotImplementedError.
    """
    tiling_of_call = tiling_of_call or tiling_on(backend.device())
    options = {"masked": mask is not None, "segmented": segments is not None, "per_channel": log_g.ndim == 4}
    options["erases"] = beta is not None
    tiling = tiling_of_call(shape_of(k, v), q.dtype, **options)
    reason = unsupported(q, k, v, tiling)
    if reason:
        raise ValueError(f"{operator_name(beta is not None)}: the fused kernels do not support this call: {reason}.")
    constants = [mask] if mask is not None else []
    constants += [segments.astype(mx.int32)] if segments is not None else []
    passes = FusedPasses(tiling_of_call, stateful=initial_state is not None, **options)
    inputs = input_of(q, k, v)
    again = recomputes()
    cut = cut_of(tiling) if again and tiling else None
    if cut:
        function = recomputing_pieces(FusedPieces(passes, cut), inputs)
    else:
        function = recomputing(passes, inputs) if again else keeping(passes)
    floats = [log_g.astype(mx.float32)]
    floats += [beta.astype(dtype_of_beta(tiling, beta.dtype))] if beta is not None else []
    floats += [initial_state.astype(mx.float32)] if initial_state is not None else []
    arrays = without_vmap(_no_vmap(beta is not None))(q, k, v, *floats, *map(mx.stop_gradient, constants))
    y, state, *_ = function(*arrays)
    return y, state


def _no_vmap(erases: bool) -> str:
    name = operator_name(erases)
    return (
        f"{name}: mx.vmap cannot map the fused kernels. Expected every array with its batch axis B first; fold "
        f"the mapped axis into B, or set DELTATUNE_{name.upper()}=chunk, which can be mapped."
    )


@cache
def tiling_on(machine: str) -> TilingOfCall:
    """Return the function that chooses tilings for `machine`, `metal` or `cuda`: the same object at every call."""
    return partial(tiling_of, machine)


def tiling_of(
    machine: str,
    shape: Shape,
    dtype: mx.Dtype,
    *,
    masked: bool,
    segmented: bool,
    per_channel: bool,
    erases: bool = True,
) -> Tiling | None:
    """Return how `machine` divides a call of shape (B, T, Hk, Hv, Dk, Dv); None where its memory cannot hold it."""
    options = {"masked": masked, "segmented": segmented}
    on_hopper = None
    if machine == "cuda" and erases and not per_channel:
        on_hopper = choose_hopper_tiling(shape, dtype, **options)
    return on_hopper or choose_tiling(machine, shape, dtype, per_channel=per_channel, erases=erases, **options)


def dtype_of_beta(tiling: Tiling | None, dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype in which the kernels read a beta of `dtype`: on Hopper that of q if beta has it, else fp32."""
    return dtype if isinstance(tiling, HopperTiling) and dtype == tiling.dtype else mx.float32


def unsupported(q: mx.array, k: mx.array, v: mx.array, tiling: Tiling | None) -> str | None:
    """Return why the kernels cannot serve a call of this tiling, or None where they can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, and the kernels want one dtype"
    if min(k.shape[3], v.shape[3]) < _SMALLEST_HEAD:
        return f"heads of {k.shape[3]} x {v.shape[3]} are smaller than {_SMALLEST_HEAD}"
    if tiling is None:
        return f"heads of {k.shape[3]} x {v.shape[3]} in {q.dtype} do not fit in a block's memory"
    return None
