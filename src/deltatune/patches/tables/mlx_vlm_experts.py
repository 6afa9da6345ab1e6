"""Replaces mlx-vlm's routers before 0.7.5, which cannot be trained with MLX 0.32.1 or later.

Those routers let gradients reach the indices of the chosen experts, for which MLX has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...upstream import SHARED_EXPERT_SCALE
from ..patch_record import TRAINING, Function, Patch
from ..small_cases import layer_input, same_layer
from .experts import weighted_block


def _route(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """The indices of the chosen experts, without a gradient, and their unnormalised scores, both [..., k]."""
    probabilities = mx.softmax(self.gate(x), axis=-1, precise=True)
    chosen = mx.stop_gradient(mx.argpartition(probabilities, kth=-self.top_k, axis=-1)[..., -self.top_k :])
    return chosen, mx.take_along_axis(probabilities, chosen, axis=-1)


def _with_shared_expert(share: Callable[[Any, mx.array], mx.array], always_normalised: bool) -> Any:
    """Build the replacement of a router with a shared expert.

    Args:
        share: The weight of the shared expert as a function of the block and x. Versions hold it in different places.
        always_normalised: Whether scores are normalised whatever `norm_topk_prob` says, as some versions do.
    """

    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, x: mx.array, *arguments: Any, **keywords: Any) -> mx.array:  # noqa: N807
            verifying = any(arguments) or any(keywords.values())
            if verifying or (not always_normalised and self.sharding_group is not None):
                return upstream(self, x, *arguments, **keywords)
            chosen, scores = _route(self, x)
            if always_normalised or self.norm_topk_prob:
                scores = scores / scores.sum(axis=-1, keepdims=True)
            y = (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)
            shared = self.shared_expert(x)
            return y + share(self, x) * shared

        return __call__

    return replacement


def _gate(self: Any, x: mx.array) -> mx.array:
    return mx.sigmoid(self.shared_expert_gate(x))


def _scale(self: Any, x: mx.array) -> mx.array:
    return getattr(self, SHARED_EXPERT_SCALE)(x)


def _experts_alone(upstream: Function) -> Function:
    """The replacement of a router without a shared expert."""

    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if getattr(self, "sharding_group", None) is not None:
            return upstream(self, x)
        chosen, scores = _route(self, x)
        if self.norm_topk_prob:
            scores = scores / mx.sum(scores, axis=-1, keepdims=True)
        return (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)

    return __call__


def _record(versions: str, module: str, name: str, signature: str, replacement: Any) -> Patch:
    return Patch(
        tried=versions,
        settled=">=0.7.5",
        module=f"mlx_vlm.models.{module}.language",
        name=f"{name}.__call__",
        signature=signature,
        reason="gradients reach the indices of the chosen experts, which mlx >= 0.32.1 refuses",
        without="Training these experts then fails with mlx >= 0.32.1, and uses upstream's code with 0.32.0.",
        needed_for=(TRAINING,),
        replacement=lambda upstream: weighted_block(replacement(upstream)),
        # Upstream's own gradient fails.
        check=same_layer(layer_input, gradient=False),
    )


_PLAIN, _QWEN3_5 = "(self, x)", ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock")

PATCHES = (
    _record("==0.7.0", *_QWEN3_5, _PLAIN, _with_shared_expert(_gate, True)),
    _record(">=0.7.1,<0.7.5", *_QWEN3_5, _PLAIN, _with_shared_expert(_scale, True)),
    _record(">=0.7.0,<0.7.5", "qwen3_vl_moe", "Qwen3VLMoESparseMoeBlock", _PLAIN, _experts_alone),
    _record(">=0.7.0,<0.7.5", "qwen3_next", "Qwen3NextSparseMoeBlock", _PLAIN, _with_shared_expert(_gate, False)),
)
