"""Replaces functions of mlx-vlm: its two gated_delta_update, routers, parts of vision towers, and a mask.

mlx-vlm exchanges the two GELUs in qwen3_vl_moe: in the model as trained, the merger has the exact GELU and the MLP the
tanh approximation. Deepstack adds image features to the first layers of the language model; mlx-vlm looks for the image
tokens on the host, which a compiled training step cannot do.

Versions read: 0.7.0 to 0.7.6, 0.7.8 to 0.7.10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...upstream import DEEPSTACK
from ..patch_record import ALWAYS, SETTLED, TRAINING, Function, Patch
from ..small_cases import BOUND, WIDTH, built, describe_difference, drawn, of_config
from .mlx_lm import ATTENTION_MASK, UPDATE_OF_LAYERS


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


def _gelu_record(name: str, forward: Callable[[Function], Function], right: str, wrong: str, build: Any) -> Patch:
    """The record of a layer with the wrong GELU, by its name in mlx.nn: upstream must agree with that, or be mended."""

    def check(upstream: Function, ours: Function) -> str | None:
        layer = built(upstream, build)
        x = 2 * drawn(0, 4, WIDTH)
        # The two GELUs differ by about 1e-4 of their results here.
        if describe_difference([upstream(layer, x)], [ours(layer, x)], 1e-5, "ours") is None:
            return SETTLED
        other = forward(getattr(nn, wrong))(layer, x)
        return describe_difference([upstream(layer, x)], [other], 1e-5, "both ways to exchange the GELUs")

    return Patch(
        module="mlx_vlm.models.qwen3_vl_moe.vision",
        name=f"{name}.__call__",
        reason="Hugging Face's model has the exact GELU in the merger and the tanh one in the MLP; mlx-vlm swaps them",
        without="Image features then differ by about 1e-3 from those that the checkpoint was trained with.",
        needed_for=ALWAYS,
        replacement=lambda _: forward(getattr(nn, right)),
        check=check,
    )


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
    hidden = drawn(0, 2, 3, 4)
    features = drawn(1, 3, 4)
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
VISION = (
    Patch(**_DEEPSTACK, module="mlx_vlm.models.qwen3_vl.language", name=f"Qwen3VLModel.{DEEPSTACK}"),
    Patch(**_DEEPSTACK, module="mlx_vlm.models.qwen3_vl_moe.language", name=f"Qwen3VLMoEModel.{DEEPSTACK}"),
    _gelu_record("PatchMerger", _merger, "gelu", "gelu_approx", of_config),
    _gelu_record("MLP", _mlp, "gelu_approx", "gelu", lambda cls: cls(WIDTH, WIDTH)),
)
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
    Patch(**UPDATE_OF_LAYERS, module="mlx_vlm.models.qwen3_5.gated_delta"),
    Patch(**UPDATE_OF_LAYERS, module="mlx_vlm.models.gated_delta"),
    Patch(**ATTENTION_MASK, module="mlx_vlm.models.base"),
    *VISION,
)
