"""Replaces functions of mlx-vlm: its two gated_delta_update, routers, parts of vision towers, and a mask.

Versions read: 0.7.0 to 0.7.6, 0.7.8 to 0.7.10.
"""

from __future__ import annotations

from .. import recurrence
from ..patch_record import PACKING, TRAINING, Patch
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

PATCHES = (
    _update(QWEN3_5, "==0.7.0", "", _QWEN3_5_HOLDERS),
    _update(QWEN3_5, ">=0.7.1,<=0.7.10", _STEPS, _QWEN3_5_HOLDERS),
    _update(SHARED, "==0.7.0", _BOUND, _SHARED_HOLDERS),
    _update(SHARED, ">=0.7.1,<=0.7.10", f"{_BOUND}{_STEPS}", _SHARED_HOLDERS),
    Patch(**ATTENTION_MASK, module="mlx_vlm.models.base"),
    *mlx_vlm_vision.PATCHES,
)
