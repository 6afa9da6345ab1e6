"""Replaces layers of experts, and the routers that sum their outputs, with the operator ops.experts.expert_block.

Two kinds of classes are changed. SwitchGLU and SwitchMLP, which hold the experts, call the operator in training instead
of three gathered products. The blocks around them end in (experts(x, indices) * scores[..., None]).sum(axis=-2): they
get a `DeferredExperts` in place of the experts' outputs, so that the operator weights and sums the outputs itself, and
an array [tokens, k, D] never exists. Where routers are watched (ops.experts.routing), these blocks report the logits
and the choices of their router.

Versions read: mlx-lm 0.32.0, 0.32.2; mlx-vlm 0.7.0, 0.7.1, 0.7.10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...lora.experts import projection
from ...machine import backend
from ...ops.experts import expert_block, routing, swiglu
from ...ops.tracing import trace
from ...upstream import COMBINE
from ..patch_record import Function, Patch
from ..small_cases import LENGTH, WIDTH, drawn, layer_input, same_layer
from ..whole_rows import asked_for_names, note_call

# Activations that compute silu(gate) * up. The operator has its own, with a cheaper sigmoid and its own gradient.
_SWIGLU = ("mlx_lm.models.switch_layers.SwiGLU", "mlx_vlm.models.switch_layers.SwiGLU")

# Routers with sigmoids as probabilities; the others' are a softmax, and KimiSparseMoE's depend on its options.
_SIGMOID_BLOCKS = ("KimiK3SparseMoE", "BailingSparseMoE")


class DeferredExperts:
    """Lazy outputs of experts [..., k, D], so that scores and the sum over k can join them.

    `(deferred * scores[..., None]).sum(axis=-2)` computes everything at once. Any other use first computes the outputs
    and continues with that array. Functions of MLX, and operators with an array on their left, do not accept it; no
    block in the tables below uses one. `run` computes the outputs: summed with the scores [..., k] that it is given, or
    all k of them for None.
    """

    def __init__(
        self,
        run: Callable[[mx.array | None], mx.array],
        shape: tuple[int, ...],
        dtype: mx.Dtype,
        scores: mx.array | None = None,
    ):
        self._run = run
        self._scores = scores
        self.shape = shape
        self.dtype = dtype
        self._array: mx.array | None = None

    def __mul__(self, scores: Any) -> Any:
        if self._scores is None and isinstance(scores, mx.array) and scores.shape == (*self.shape[:-1], 1):
            dtype = mx.result_type(self.dtype, scores.dtype)
            return DeferredExperts(self._run, self.shape, dtype, scores.squeeze(-1))
        return self._computed() * scores

    def sum(self, axis: int | None = None, keepdims: bool = False) -> mx.array:
        if self._scores is not None and axis in (-2, len(self.shape) - 2) and not keepdims:
            return self._run(self._scores)
        return self._computed().sum(axis, keepdims)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._computed(), name)

    def _computed(self) -> mx.array:
        if self._array is None:
            outputs = self._run(None)
            self._array = outputs if self._scores is None else outputs * self._scores[..., None]
        return self._array


def weighted_block(upstream: Function) -> Function:
    """The replacement of a block's __call__ that lets its experts wait for their scores (see DeferredExperts)."""

    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        watched = routing.watched()
        if not (watched or self.training or backend.computes_in_fp32()):
            # Upstream's experts run (_runner), which do not wait for scores; a decoder opens no context for each token.
            return upstream(self, x)
        indices: list[mx.array] = []
        with trace.having(chosen_experts=indices):
            if not watched:
                return upstream(self, x)
            with _listening_to_gate(self) as logits:
                y = upstream(self, x)
        routing.add_sums(logits[0], indices[0], sigmoid=_has_sigmoids(self))
        return y

    __call__.routes = True  # type: ignore[attr-defined]
    return __call__


def has_routers(model: nn.Module) -> bool:
    """Whether a mixture of the model is a block that weighted_block() serves, and so reports on its router."""
    return any(getattr(type(module).__call__, "routes", False) for module in model.modules())


@contextmanager
def _listening_to_gate(block: Any) -> Iterator[list[mx.array]]:
    """Within the context, the logits of the block's gate are appended to the yielded list."""
    gate = block.gate
    heard = []

    def listening(x: mx.array) -> Any:
        output = gate(x)
        # Bailing's gate returns the chosen experts and their scores; its logits are recomputed, as it does.
        is_logits = isinstance(output, mx.array)
        heard.append(output if is_logits else x.astype(mx.float32) @ gate.weight.astype(mx.float32).T)
        return output

    dict.__setitem__(block, "gate", listening)
    try:
        yield heard
    finally:
        dict.__setitem__(block, "gate", gate)


def _has_sigmoids(block: Any) -> bool:
    kind = type(block).__name__
    return kind in _SIGMOID_BLOCKS or (kind == "KimiSparseMoE" and block.args.moe_router_activation_func == "sigmoid")


def _runner(self: Any, names: tuple[str, ...], x: mx.array, indices: mx.array) -> Callable | None:
    """The operator on this layer as a function of the scores, or None where upstream's code has to run.

    Upstream's code runs where a projection is of an unknown kind, and in inference. On a CPU, MLX has no gathered
    product for half precision or for matrices with a global scale (nvfp4), so the operator serves those in
    inference as well.
    """
    trains = self.training or asked_for_names()
    if not trains and not (backend.computes_in_fp32() and _is_beyond_mlx(self, names, x)):
        return None
    projections = [known for name in names if (known := projection(self[name])) is not None]
    if len(projections) < len(names):
        note_call("experts", None)
        return None
    note_call("experts", lambda: "grouped")
    up, down, *gate = projections
    kind = type(self.activation)
    activation = swiglu if f"{kind.__module__}.{kind.__qualname__}" in _SWIGLU else self.activation
    return lambda scores: expert_block(x, indices, scores, up, down, gate[0] if gate else None, activation)


def _is_beyond_mlx(layer: Any, names: tuple[str, ...], x: mx.array) -> bool:
    """Whether MLX has no product on a CPU for these rows and the layer's projections, bare or in adapters."""
    if x.dtype != mx.float32:
        return True
    return any("global_scale" in projected.get("linear", projected) for projected in map(layer.get, names))


def _called(indices: mx.array) -> bool:
    """Note that experts are called; return whether this is in a block with experts that wait for their scores."""
    chosen = trace.current().chosen_experts
    if chosen is not None:
        chosen.append(indices)
    return chosen is not None


def _switch(*names: str) -> Callable[[Function], Function]:
    """The replacement for a layer of experts with projections of these names: up, down and, if any, gate."""

    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, x: mx.array, indices: mx.array) -> Any:  # noqa: N807
            run = _runner(self, names, x, indices)
            if run is None:
                return upstream(self, x, mx.stop_gradient(indices))
            if _called(indices):
                return DeferredExperts(run, (*indices.shape, x.shape[-1]), x.dtype)
            return run(None)

        return __call__

    return replacement


_GLU = ("up_proj", "down_proj", "gate_proj")


def _combining_switch(upstream: Function) -> Function:
    """The replacement for mlx-vlm's SwitchGLU that can also weight and sum its outputs and add other terms."""

    def __call__(  # noqa: N807
        self: Any, x: mx.array, indices: mx.array, weights: Any = None, shared: Any = None, residual: Any = None
    ) -> Any:
        run = _runner(self, _GLU, x, indices)
        if run is None:
            return upstream(self, x, mx.stop_gradient(indices), weights, shared, residual)
        if _called(indices) and weights is None and shared is None and residual is None:
            return DeferredExperts(run, (*indices.shape, x.shape[-1]), x.dtype)
        routed = run(None if weights is None else weights.astype(x.dtype))
        return getattr(self, COMBINE)(routed, None, shared, residual)

    return __call__


_RECORD: dict[str, Any] = {
    "reason": "three gathered products keep all their intermediates: slow on a CPU, and memory grows with tokens x k",
    "without": "These experts then train with upstream's code: right, but slow on a CPU, and it needs more memory.",
}

# Blocks that end in (experts * scores[..., None]).sum(axis=-2), as {module: class}.
_LM_BLOCKS = {
    "qwen3_next": "Qwen3NextSparseMoeBlock",  # qwen3_5_moe uses this class too.
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",  # qwen3_vl_moe uses this class too.
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


def _block_record(module: str, name: str) -> Patch:
    reason = "the outputs of all k experts of a token are held before they are weighted and summed"
    record = {**_RECORD, "reason": reason, "module": module, "name": f"{name}.__call__"}
    return Patch(**record, replacement=weighted_block, check=same_layer(layer_input))


def _chosen() -> mx.array:
    return mx.array([[[0, 2], [3, 1], [1, 0], [2, 3], [0, 3]]])


def _switch_record(
    package: str, name: str, replacement: Callable[[Function], Function], *more: Callable[[], mx.array]
) -> Patch:
    """The record of a layer of experts; `more` make the arguments behind the indices."""
    check = same_layer(layer_input, _chosen, *more, build=lambda cls: cls(WIDTH, 8, 4))
    module = f"{package}.models.switch_layers"
    return Patch(**_RECORD, module=module, name=f"{name}.__call__", replacement=replacement, check=check)


_COMBINED = (lambda: drawn(1, 1, LENGTH, 2), lambda: drawn(2, 1, LENGTH, WIDTH))

PATCHES: tuple[Patch, ...] = (
    _switch_record("mlx_lm", "SwitchGLU", _switch(*_GLU)),
    _switch_record("mlx_lm", "SwitchMLP", _switch("fc1", "fc2")),
    *(_block_record(f"mlx_lm.models.{module}", name) for module, name in _LM_BLOCKS.items()),
    # The first of these has the signature of mlx-vlm 0.7.0, the second that of later versions.
    _switch_record("mlx_vlm", "SwitchGLU", _switch(*_GLU)),
    _switch_record("mlx_vlm", "SwitchGLU", _combining_switch, *_COMBINED),
    _switch_record("mlx_vlm", "SwitchMLP", _switch("fc1", "fc2")),
    *(_block_record(f"mlx_vlm.models.{module}.language", name) for module, name in _VLM_BLOCKS.items()),
)
