"""Replaces functions of mlx-vlm: its two gated_delta_update, routers, parts of vision towers, and a mask.

Versions read: 0.7.0 to 0.7.6, 0.7.8 to 0.7.10.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .. import recurrence
from ..patch_record import PACKING, TRAINING, Function, Patch
from ..small_cases import BOUND, describe_difference, drawn
from . import mlx_vlm_vision
from .mlx_lm import ATTENTION_MASK, LOOP, UPDATE_PLAIN, same_update

QWEN3_5 = "mlx_vlm.models.qwen3_5.gated_delta"
SHARED = "mlx_vlm.models.gated_delta"


_REASON = (
    "in training the forward pass is a loop or a scan over tokens; in evaluation it is a kernel without a gradient"
)


def _update(module: str, versions: str, more: str, holders: tuple[str, ...]) -> Patch:
    """The record of a gated_delta_update. `more`: its signature after the parameters that all have."""
    bounded = [{}, {"lower_bound": -5.0}] if "lower_bound" in more else [{}]
    return Patch(
        tried=versions,
        module=module,
        name="gated_delta_update",
        signature=f"({UPDATE_PLAIN}{more})",
        holders=tuple(f"mlx_vlm.models.{name}" for name in holders),
        reason=_REASON,
        without=LOOP,
        needed_for=(TRAINING, PACKING),
        replacement=recurrence.update,
        check=same_update(bounded),
    )


_SHARED_HOLDERS = tuple(f"{name}.language" for name in ("glm5_next", "kimi_k3", "kimi_linear", "qwen3_next"))
_QWEN3_5_HOLDERS = ("qwen3_5.language", "qwen3_5.speculative_verifier")

# Parameters that some versions have more.
_BOUND = ", lower_bound=None"
_STEPS = ", state_steps=None, cache=None, cache_index=1"


def _argpartition(upstream: Function) -> Function:
    def argpartition(*arguments: Any, **options: Any) -> mx.array:
        return mx.stop_gradient(upstream(*arguments, **options))

    return argpartition


def _has_no_gradient(upstream: Function, ours: Function) -> str | None:
    """Compare the two largest numbers of a row, and the gradient of their sum, with those of a mask."""
    x = drawn(0, 3, 8)

    def largest(x: mx.array) -> mx.array:
        return mx.take_along_axis(x, ours(x, kth=-2, axis=-1)[..., -2:], axis=-1).sum()

    chosen = x >= mx.sort(x, axis=-1)[..., -2:-1]
    value, gradient = mx.value_and_grad(largest)(x)
    expected = [mx.where(chosen, x, 0).sum(), chosen.astype(x.dtype)]
    return describe_difference([value, gradient], expected, BOUND, "the largest numbers")


PATCHES = (
    # It stands before the blocks of experts, whose checks run such routers.
    Patch(
        "mlx.core",
        "argpartition",
        _argpartition,
        _has_no_gradient,
        reason="routers of mlx-vlm before 0.7.5 let gradients reach the indices of chosen experts, which MLX refuses",
        without="Mixtures of experts of mlx-vlm before 0.7.5 cannot be trained then.",
    ),
    _update(QWEN3_5, "==0.7.0", "", _QWEN3_5_HOLDERS),
    _update(QWEN3_5, ">=0.7.1,<=0.7.10", _STEPS, _QWEN3_5_HOLDERS),
    _update(SHARED, "==0.7.0", _BOUND, _SHARED_HOLDERS),
    _update(SHARED, ">=0.7.1,<=0.7.10", f"{_BOUND}{_STEPS}", _SHARED_HOLDERS),
    Patch(**ATTENTION_MASK, module="mlx_vlm.models.base"),
    *mlx_vlm_vision.PATCHES,
)
