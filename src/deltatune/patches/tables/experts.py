"""The patches for expert layers, as a table. Versions read: mlx-lm 0.31.3, 0.32.0, 0.32.2; mlx-vlm 0.6.17, 0.7.10.

Two levels. A SwitchGLU or SwitchMLP in training runs ops.experts.expert_block instead of three gathered products. And
since the routers of many families end in (experts(x, indices) * scores[..., None]).sum(axis=-2), their blocks run
with `Routed` in place of the experts' outputs, so that the scores too go into the block, and [tokens, k, D] never is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from ...lora.experts import projection
from ...machine import backend
from ...ops.experts import expert_block, swiglu
from ..patch import Function, Patch

# silu(gate) * up, which the block has with a cheaper sigmoid and a gradient of its own.
_SWIGLU = ("mlx_lm.models.switch_layers.SwiGLU", "mlx_vlm.models.switch_layers.SwiGLU")

_deferring: ContextVar[bool] = ContextVar("deltatune_deferring_experts", default=False)


class Routed:
    """Outputs of experts [..., k, D] that nobody has computed: times scores, summed over k, they are one block.

    For anything else that is asked of it, it computes them and answers as that array does. MLX's own functions and
    operators with an array on the left raise: no block of the tables below uses one.
    """

    def __init__(self, run: Callable[[mx.array | None], mx.array], indices: mx.array, width: int, dtype: mx.Dtype):
        self._run, self._indices = run, indices
        self.shape, self.dtype = (*indices.shape, width), dtype
        self._array: mx.array | None = None

    def __mul__(self, scores: Any) -> Any:
        if isinstance(scores, mx.array) and scores.shape == (*self.shape[:-1], 1):
            return _Weighted(self, scores.squeeze(-1))
        return self._computed() * scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._computed(), name)

    def _computed(self) -> mx.array:
        if self._array is None:
            self._array = self._run(None)
        return self._array


class _Weighted:
    """Routed times its scores."""

    def __init__(self, routed: Routed, scores: mx.array):
        self._routed, self._scores = routed, scores

    def sum(self, axis: int | None = None, keepdims: bool = False) -> mx.array:
        routed = self._routed
        if axis in (-2, len(routed.shape) - 2) and not keepdims:
            return routed._run(self._scores)
        return self._computed().sum(axis, keepdims)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._computed(), name)

    def _computed(self) -> mx.array:
        return self._routed._computed() * self._scores[..., None]


def weighted_block(upstream: Function) -> Function:
    """The call of a block whose experts may wait for their scores (Routed)."""

    def __call__(self: Any, x: mx.array, *arguments: Any, **keywords: Any) -> mx.array:  # noqa: N807
        token = _deferring.set(True)
        try:
            return upstream(self, x, *arguments, **keywords)
        finally:
            _deferring.reset(token)

    return __call__


def _runner(self: Any, names: tuple[str, ...], x: mx.array, indices: mx.array) -> Callable | None:
    """The block of this layer as a function of its scores; None where upstream's code is to run.

    That is inference, except on a CPU for half precision and nvfp4 with a global scale, where MLX has no product for
    it; and any projection of a kind that is not known.
    """
    on_cpu = backend.device() == "cpu"
    if not self.training and not on_cpu:
        return None
    found = [projection(self[name]) for name in names]
    projections = [each for each in found if each is not None]
    if len(projections) < len(found):
        return None
    only_here = on_cpu and (x.dtype != mx.float32 or any(each.global_scale is not None for each in projections))
    if not self.training and not only_here:
        return None
    up, down, *gate = projections
    kind = type(self.activation)
    activation = swiglu if f"{kind.__module__}.{kind.__qualname__}" in _SWIGLU else self.activation
    return lambda scores: expert_block(x, indices, scores, up, down, gate[0] if gate else None, activation)


def _switch(*names: str) -> Callable[[Function], Function]:
    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, x: mx.array, indices: mx.array) -> Any:  # noqa: N807
            run = _runner(self, names, x, indices)
            if run is None:
                return upstream(self, x, mx.stop_gradient(indices))
            if _deferring.get():
                return Routed(run, indices, x.shape[-1], x.dtype)
            return run(None)

        return __call__

    return replacement


_GLU = ("up_proj", "down_proj", "gate_proj")


def _combining_switch(upstream: Function) -> Function:
    def __call__(  # noqa: N807
        self: Any, x: mx.array, indices: mx.array, weights: Any = None, shared: Any = None, residual: Any = None
    ) -> Any:
        run = _runner(self, _GLU, x, indices)
        if run is None:
            return upstream(self, x, mx.stop_gradient(indices), weights, shared, residual)
        if _deferring.get() and weights is None and shared is None and residual is None:
            return Routed(run, indices, x.shape[-1], x.dtype)
        routed = run(None if weights is None else weights.astype(x.dtype))
        return self._combine(routed, None, shared, residual)

    return __call__


_RECORD: dict[str, Any] = {
    "holders": (),
    "reason": "three gathered products with all their intermediates: slow on a CPU, and memory with tokens x k",
    "without": "Training these experts then runs upstream's code: right, but slow on a CPU and hungry for memory.",
}
_LM: dict[str, Any] = {**_RECORD, "package": "mlx_lm", "versions": ">=0.31.3,<=0.32.2"}
_VLM: dict[str, Any] = {**_RECORD, "package": "mlx_vlm"}
_CALL = "(self, x, indices)"
_COMBINING_CALL = "(self, x, indices, weights=None, shared=None, residual=None)"

# Blocks that end in (experts * scores[..., None]).sum(axis=-2): module -> class.
_LM_BLOCKS = {
    "qwen3_next": "Qwen3NextSparseMoeBlock",  # qwen3_5_moe as well
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",  # qwen3_vl_moe as well
    "kimi_linear": "KimiSparseMoE",
    "kimi_k3": "KimiK3SparseMoE",
    "bailing_moe_v3": "BailingSparseMoE",
    "olmoe": "OlmoeSparseMoeBlock",
    "mixtral": "MixtralSparseMoeBlock",
}
_VLM_BLOCKS = {
    "qwen3_next": "Qwen3NextSparseMoeBlock",
    "qwen3_5_moe": "Qwen3_5MoeSparseMoeBlock",
    "qwen3_vl_moe": "Qwen3VLMoESparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "kimi_linear": "KimiSparseMoE",
    "kimi_k3": "KimiK3SparseMoE",
}


def _block_record(base: dict[str, Any], module: str, name: str, **more: Any) -> Patch:
    record = {**base, "reason": "the outputs of k experts a token live at once before they are weighted and summed"}
    signature = "(self, x)"
    return Patch(
        **record, module=module, name=f"{name}.__call__", signature=signature, replacement=weighted_block, **more
    )


def _switch_records(base: dict[str, Any], module: str, **more: Any) -> tuple[Patch, ...]:
    return (
        Patch(**base, module=module, name="SwitchGLU.__call__", signature=_CALL, replacement=_switch(*_GLU), **more),
        Patch(
            **base,
            module=module,
            name="SwitchMLP.__call__",
            signature=_CALL,
            replacement=_switch("fc1", "fc2"),
            **more,
        ),
    )


_VLM_SWITCH = "mlx_vlm.models.switch_layers"

PATCHES: tuple[Patch, ...] = (
    *_switch_records(_LM, "mlx_lm.models.switch_layers"),
    *(_block_record(_LM, f"mlx_lm.models.{module}", name) for module, name in _LM_BLOCKS.items()),
    *_switch_records(_VLM, _VLM_SWITCH, versions="==0.6.17"),
    Patch(
        **_VLM,
        module=_VLM_SWITCH,
        name="SwitchGLU.__call__",
        versions="==0.7.10",
        signature=_COMBINING_CALL,
        replacement=_combining_switch,
    ),
    Patch(
        **_VLM,
        module=_VLM_SWITCH,
        name="SwitchMLP.__call__",
        versions="==0.7.10",
        signature=_CALL,
        replacement=_switch("fc1", "fc2"),
    ),
    *(
        _block_record(_VLM, f"mlx_vlm.models.{module}.language", name, versions=">=0.6.17,<=0.7.10")
        for module, name in _VLM_BLOCKS.items()
    ),
)
