"""Replaces two parts of mlx-vlm's Qwen3-VL models: the GELUs of the MoE vision tower, and deepstack.

mlx-vlm exchanges the two GELUs in qwen3_vl_moe: in the model as trained, the merger has the exact GELU and the MLP the
tanh approximation. Deepstack adds image features to the first layers of the language model; mlx-vlm looks for the image
tokens on the host, which a compiled training step cannot do.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..patch_record import Function, Patch
from . import LOWEST_MLX_VLM


def _merger(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if self.use_postshuffle_norm:
            x = self.norm(x.reshape(-1, self.hidden_size))
        else:
            x = self.norm(x).reshape(-1, self.hidden_size)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))

    return __call__


def _mlp(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        return self.linear_fc2(nn.gelu_approx(self.linear_fc1(x)))

    return __call__


def _deepstack(upstream: Function) -> Function:
    """Features that are arranged by token already, [B, T, D], are added. Others go to upstream's code."""

    def _deepstack_process(
        self: Any, hidden_states: mx.array, visual_pos_masks: mx.array, visual_embeds: mx.array
    ) -> mx.array:
        if visual_embeds.ndim == 3:
            return hidden_states + visual_embeds.astype(hidden_states.dtype)
        return upstream(self, hidden_states, visual_pos_masks, visual_embeds)

    return _deepstack_process


_DEEPSTACK: dict[str, Any] = {
    "package": "mlx_vlm",
    "versions": f">={LOWEST_MLX_VLM},<=0.7.10",
    "signature": "(self, hidden_states, visual_pos_masks, visual_embeds)",
    "holders": (),
    "reason": "upstream looks for the image tokens on the host, which a compiled step cannot do",
    "without": "deltatune cannot train this model on images then.",
    "replacement": _deepstack,
}
_RECORD: dict[str, Any] = {
    "package": "mlx_vlm",
    "versions": f">={LOWEST_MLX_VLM},<=0.7.10",
    "module": "mlx_vlm.models.qwen3_vl_moe.vision",
    "signature": "(self, x)",
    "holders": (),
    "reason": "Hugging Face's model has the exact GELU in the merger and the tanh one in the MLP; mlx-vlm swaps them",
    "without": "Image features then differ by about 1e-3 from those that the checkpoint was trained with.",
}

PATCHES = (
    Patch(**_DEEPSTACK, module="mlx_vlm.models.qwen3_vl.language", name="Qwen3VLModel._deepstack_process"),
    Patch(**_DEEPSTACK, module="mlx_vlm.models.qwen3_vl_moe.language", name="Qwen3VLMoEModel._deepstack_process"),
    Patch(**_RECORD, name="PatchMerger.__call__", replacement=_merger),
    Patch(**_RECORD, name="MLP.__call__", replacement=_mlp),
)
