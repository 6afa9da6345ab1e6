"""Replaces two parts of mlx-vlm's Qwen3-VL models: the GELUs of the MoE vision tower, and deepstack.

mlx-vlm exchanges the two GELUs in qwen3_vl_moe: in the model as trained, the merger has the exact GELU and the MLP the
tanh approximation. Deepstack adds image features to the first layers of the language model; mlx-vlm looks for the image
tokens on the host, which a compiled training step cannot do.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...upstream import DEEPSTACK
from ..patch_record import ALWAYS, SETTLED, TRAINING, Check, Function, Patch
from ..small_cases import WIDTH, SmallConfig, built, describe_difference, drawn


def _merger(activation: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if self.use_postshuffle_norm:
            x = self.norm(x.reshape(-1, self.hidden_size))
        else:
            x = self.norm(x).reshape(-1, self.hidden_size)
        return self.linear_fc2(activation(self.linear_fc1(x)))

    return __call__


def _mlp(activation: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        return self.linear_fc2(activation(self.linear_fc1(x)))

    return __call__


def _has_the_other_gelu(other: Function, build: Any, *shape: int) -> Check:
    """Build a check: upstream must agree with `other`, or else have mended it."""

    def check(upstream: Function, ours: Function) -> str | None:
        layer, x = built(upstream, build), 2 * drawn(0, *shape)
        # The two GELUs differ by about 1e-4 of their results here.
        if describe_difference([upstream(layer, x)], [ours(layer, x)], 1e-5, "ours") is None:
            return SETTLED
        return describe_difference([upstream(layer, x)], [other(layer, x)], 1e-5, "both ways to exchange the GELUs")

    return check


def _deepstack(upstream: Function) -> Function:
    """Features that are arranged by token already, [B, T, D], are added. Others go to upstream's code."""

    def add_features(
        self: Any, hidden_states: mx.array, visual_pos_masks: mx.array, visual_embeds: mx.array
    ) -> mx.array:
        if visual_embeds.ndim == 3:
            return hidden_states + visual_embeds.astype(hidden_states.dtype)
        return upstream(self, hidden_states, visual_pos_masks, visual_embeds)

    return add_features


def _adds_features(upstream: Function, ours: Function) -> str | None:
    """Compare upstream's sum, of features [N, D], with ours, of features that are arranged by token."""
    hidden, features = drawn(0, 2, 3, 4), drawn(1, 3, 4)
    images = mx.array([[False, True, True], [True, False, False]])
    zero = mx.zeros((4,))
    by_token = mx.stack([mx.stack([zero, *features[:2]]), mx.stack([features[2], zero, zero])])
    expected = upstream(None, hidden, images, features)
    return describe_difference([ours(None, hidden, images, by_token)], [expected], 1e-6, "upstream's sum")


_DEEPSTACK: dict[str, Any] = {
    "reason": "upstream looks for the image tokens on the host, which a compiled step cannot do",
    "without": "deltatune cannot train this model on images then.",
    "needed_for": (TRAINING,),
    "replacement": _deepstack,
    "check": _adds_features,
}
_RECORD: dict[str, Any] = {
    "module": "mlx_vlm.models.qwen3_vl_moe.vision",
    "reason": "Hugging Face's model has the exact GELU in the merger and the tanh one in the MLP; mlx-vlm swaps them",
    "without": "Image features then differ by about 1e-3 from those that the checkpoint was trained with.",
    "needed_for": ALWAYS,
}

PATCHES = (
    Patch(**_DEEPSTACK, module="mlx_vlm.models.qwen3_vl.language", name=f"Qwen3VLModel.{DEEPSTACK}"),
    Patch(**_DEEPSTACK, module="mlx_vlm.models.qwen3_vl_moe.language", name=f"Qwen3VLMoEModel.{DEEPSTACK}"),
    Patch(
        **_RECORD,
        name="PatchMerger.__call__",
        replacement=lambda _: _merger(nn.gelu),
        check=_has_the_other_gelu(_merger(nn.gelu_approx), lambda cls: cls(SmallConfig()), 4, WIDTH),
    ),
    Patch(
        **_RECORD,
        name="MLP.__call__",
        replacement=lambda _: _mlp(nn.gelu_approx),
        check=_has_the_other_gelu(_mlp(nn.gelu), lambda cls: cls(WIDTH, WIDTH), 4, WIDTH),
    ),
)
