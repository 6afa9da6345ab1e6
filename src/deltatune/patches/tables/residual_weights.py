"""Kimi K3's residual weights, a product of two parameters that mlx-lm and mlx-vlm cache for too long.

Versions read: mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0, 0.7.1, 0.7.5, 0.7.10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ...upstream import RESIDUAL_WEIGHTS_OF_LAYER, RESIDUAL_WEIGHTS_OF_MODEL
from ..patch_record import SETTLED, TRAINING, Check, Function, Patch
from ..small_cases import BOUND, Build, SmallConfig, built, describe_difference, drawn, layer_input, of_config


def _fresh_product(*caches: str) -> Any:
    """Build a replacement that computes the cached attributes `caches` anew in each call, and leaves none behind."""

    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: N807
            def clear() -> None:
                if self.use_attn_res:
                    for name in caches:
                        setattr(self, name, None)

            clear()
            try:
                return upstream(self, *arguments, **keywords)
            finally:
                clear()

        return __call__

    return replacement


def _in_second_block(upstream: Function) -> tuple[Any, ...]:
    """The arguments of the second layer: its input, no mask, no cache, and the blocks before it."""
    blocks = upstream.__globals__["ResidualBlocks"](1e-6)
    blocks.append(drawn(1, 1, 5, 16))
    return layer_input(), None, None, blocks


def _stale(build: Build, arguments: Callable[[Function], tuple[Any, ...]]) -> Check:
    """Build a check: after an update of the weights, ours agrees in evaluation with upstream in training."""

    def check(upstream: Function, ours: Function) -> str | None:
        layer = built(upstream, build)

        def output(function: Function, training: bool) -> mx.array:
            layer.train(training)
            result = function(layer, *arguments(upstream))
            return result[0] if isinstance(result, tuple) else result

        output(upstream, False)
        layer.update(tree_map(lambda x: 1.0 - x, layer.parameters()))
        old, fresh = output(upstream, False), output(ours, False)
        expected = output(upstream, True)
        if describe_difference([old], [expected], BOUND, "") is None:
            return SETTLED
        return describe_difference([fresh], [expected], BOUND, "a training forward")

    return check


def _records(module: str, model_signature: str) -> tuple[Patch, ...]:
    shared: dict[str, Any] = {
        "module": module,
        "reason": "outside training, a cached product of weights is used that is one step old and has no gradient",
        "without": "An evaluation between training steps then uses residual weights that are one step old, and a "
        "forgotten model.train() loses their gradient.",
        "needed_for": (TRAINING,),
    }
    return (
        Patch(
            **shared,
            name="KimiK3DecoderLayer.__call__",
            signature="(self, x, mask=None, cache=None, blocks=None)",
            replacement=_fresh_product(*RESIDUAL_WEIGHTS_OF_LAYER),
            check=_stale(lambda cls: cls(SmallConfig(), 1), _in_second_block),
        ),
        Patch(
            **shared,
            name="KimiK3TextModel.__call__",
            signature=model_signature,
            replacement=_fresh_product(*RESIDUAL_WEIGHTS_OF_MODEL),
            check=_stale(of_config, lambda _: (mx.array([[3, 1, 4, 1, 5]]),)),
        ),
    )


PATCHES = (
    *_records("mlx_lm.models.kimi_k3", "(self, inputs, cache=None)"),
    *_records("mlx_vlm.models.kimi_k3.language", "(self, inputs, cache=None, inputs_embeds=None)"),
)
