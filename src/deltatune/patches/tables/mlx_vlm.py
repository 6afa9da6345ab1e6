"""Replaces functions of mlx-vlm: the recurrence, and the fused rotary embedding of versions 0.6.2 and 0.6.3.

mlx-vlm 0.5.0 imports mlx-lm's gated_delta_update, which mlx-lm's record replaces. Later versions define two of their
own. Versions read: 0.5.0, 0.6.2 to 0.6.4, 0.6.8, 0.6.12, 0.6.17, 0.7.0, 0.7.3 to 0.7.6, 0.7.8 to 0.7.10.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .. import recurrence
from ..patch_record import PACKING, TRAINING, Function, Patch
from ..small_cases import drawn, same_layer
from . import mlx_vlm_experts, mlx_vlm_vision
from .mlx_lm import ATTENTION_MASK, LOOP, UPDATE_PLAIN, same_update

QWEN3_5 = "mlx_vlm.models.qwen3_5.gated_delta"
SHARED = "mlx_vlm.models.gated_delta"


def _rotary(upstream: Function) -> Function:
    """Upstream's rotation, whichever kernel computes it, with the gradient of its form in array operations."""

    def apply_rotary(
        self: Any, q: mx.array, k: mx.array, position_ids: mx.array, *, unsqueeze_dim: int = 1, cast_output: bool = True
    ) -> Any:
        options = {"unsqueeze_dim": unsqueeze_dim, "cast_output": cast_output}
        if not self.fused_apply:
            return upstream(self, q, k, position_ids, **options)

        def forward(q: mx.array, k: mx.array, positions: mx.array) -> Any:
            return upstream(self, q, k, positions, **options)

        def plain(q: mx.array, k: mx.array, positions: mx.array) -> list[mx.array]:
            # Only this flag chooses between upstream's two forms. It is restored before any other code can run.
            self.fused_apply = False
            try:
                return list(upstream(self, q, k, positions, **options))
            finally:
                self.fused_apply = True

        call: Any = mx.custom_function(forward)

        @call.vjp
        def backward(primals: Any, cotangents: Any, _: Any) -> Any:
            *rotated, positions = primals
            gradients = mx.vjp(lambda q, k: plain(q, k, positions), rotated, list(cotangents))[1]
            return *gradients, mx.zeros_like(positions)

        # Positions are an argument, because a gradient that captured them would keep their whole graph alive.
        return call(q, k, mx.stop_gradient(position_ids))

    return apply_rotary


_REASON = (
    "in training the forward pass is a loop or a scan over tokens; in evaluation it is a kernel without a gradient"
)


def _update(module: str, versions: str, more: str, holders: tuple[str, ...]) -> Patch:
    """The record of a gated_delta_update. `more`: what its signature has after the parameters that all have."""
    bounded = [{}, {"lower_bound": -5.0}] if "lower_bound" in more else [{}]
    return Patch(
        package="mlx_vlm",
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

PATCHES = (
    _update(QWEN3_5, ">=0.6.2,<=0.7.10", "", _QWEN3_5_HOLDERS),
    _update(QWEN3_5, ">=0.7.1,<=0.7.10", ", state_steps=None, cache=None, cache_index=1", _QWEN3_5_HOLDERS),
    _update(SHARED, ">=0.6.3,<=0.7.10", ", lower_bound=None", _SHARED_HOLDERS),
    _update(SHARED, ">=0.6.3,<=0.7.10", "", _SHARED_HOLDERS),
    _update(
        SHARED,
        ">=0.7.1,<=0.7.10",
        ", lower_bound=None, state_steps=None, cache=None, cache_index=1",
        _SHARED_HOLDERS,
    ),
    # Earlier versions import mlx-lm's function.
    Patch(
        **ATTENTION_MASK,
        package="mlx_vlm",
        tried=">=0.6.4,<=0.7.10",
        settled="<0.6.4",
        module="mlx_vlm.models.base",
    ),
    Patch(
        package="mlx_vlm",
        tried=">=0.6.2,<0.6.4",
        settled=">=0.6.4",
        module="mlx_vlm.models.rope_utils",
        name="MRoPERotaryEmbedding.apply_rotary",
        signature="(self, q, k, position_ids, *, unsqueeze_dim=1, cast_output=True)",
        holders=(),
        reason="the fused rotation is a Metal kernel without a gradient, and is used in training too",
        without="On Apple GPUs the training step of attention layers then fails: CustomKernel has no vjp.",
        needed_for=(TRAINING,),
        replacement=_rotary,
        check=same_layer(
            lambda: drawn(0, 1, 2, 3, 8),
            lambda: drawn(1, 1, 2, 3, 8),
            lambda: mx.arange(3)[None],
            build=lambda cls: cls(8, mrope_section=[2, 1, 1]),
            # The fused form has none.
            gradient=False,
        ),
    ),
    *mlx_vlm_experts.PATCHES,
    *mlx_vlm_vision.PATCHES,
)
