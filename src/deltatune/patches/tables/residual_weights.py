"""Kimi K3's residual weights, a product of two parameters that mlx-lm and mlx-vlm cache for too long.

Versions read: mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0, 0.7.1, 0.7.5, 0.7.10.
"""

from __future__ import annotations

from typing import Any

from ..patch_record import Function, Patch


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


def _records(package: str, versions: str, module: str, model_signature: str) -> tuple[Patch, ...]:
    shared: dict[str, Any] = {
        "package": package,
        "versions": versions,
        "module": module,
        "holders": (),
        "reason": "outside training, a cached product of weights is used that is one step old and has no gradient",
        "without": "An evaluation between training steps then uses residual weights that are one step old, and a "
        "forgotten model.train() loses their gradient.",
    }
    return (
        Patch(
            **shared,
            name="KimiK3DecoderLayer.__call__",
            signature="(self, x, mask=None, cache=None, blocks=None)",
            replacement=_fresh_product("_attn_res_w_eff", "_mlp_res_w_eff"),
        ),
        Patch(
            **shared,
            name="KimiK3TextModel.__call__",
            signature=model_signature,
            replacement=_fresh_product("_output_res_w_eff"),
        ),
    )


PATCHES = (
    *_records("mlx_lm", ">=0.32.0,<=0.32.2", "mlx_lm.models.kimi_k3", "(self, inputs, cache=None)"),
    *_records(
        "mlx_vlm",
        ">=0.7.0,<=0.7.10",
        "mlx_vlm.models.kimi_k3.language",
        "(self, inputs, cache=None, inputs_embeds=None)",
    ),
)
