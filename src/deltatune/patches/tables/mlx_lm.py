"""Replaces functions of mlx-lm: the recurrence, and those that have to keep packed documents separate.

Kimi K3's residual weights are a product of two parameters that mlx-lm and mlx-vlm cache for too long.

Versions read: mlx-lm 0.32.0, 0.32.1, 0.32.2; mlx-vlm 0.7.0, 0.7.1, 0.7.5, 0.7.10.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from ...ops import segments
from ...ops.causal_conv import causal_conv, is_faster
from ...ops.pointwise.passes import OPERATOR as PASSES
from ...ops.recomputation import keeps_inputs_alone
from ...ops.tracing import trace
from ...upstream import RESIDUAL_WEIGHTS_OF_LAYER, RESIDUAL_WEIGHTS_OF_MODEL
from .. import recurrence
from ..evidence import signature_text
from ..patch_record import PACKING, SETTLED, TRAINING, Check, Function, Patch
from ..small_cases import (
    BOUND,
    LENGTH,
    WIDTH,
    Build,
    SmallConfig,
    built,
    causal,
    describe_difference,
    drawn,
    layer_input,
    of_config,
    results,
    same_layer,
)

MIXED = "Packed documents then influence one another; training without packing is not affected."


def _same_update(upstream: Function, ours: Function) -> str | None:
    """Compare the installed gated_delta_update with deltatune's on three tokens, with gradients.

    It compares once for each option of the gates that this version has, and for each kind of gates.
    """
    parameters = inspect.signature(upstream).parameters
    if unknown := [name for name in parameters if name not in recurrence.PARAMETERS]:
        return f"its signature is {signature_text(upstream)}, and {', '.join(unknown)} was not expected."
    q, k, v = (0.5 * drawn(seed, 1, 3, heads, size) for seed, heads, size in ((0, 1, 4), (1, 1, 4), (2, 2, 3)))
    of_heads = ((1, 3, 2), (1, 3, 2), (2,), (2,))
    of_channels = ((1, 3, 2, 4), (1, 3, 2), (2, 1), (2, 4))
    for shapes in (of_heads, of_channels):
        arrays = [q, k, v, *(0.5 * drawn(3 + at, *shape) for at, shape in enumerate(shapes))]
        for option in [{}, *({name: value} for name, value in recurrence.OPTIONS.items() if name in parameters)]:
            actual, expected = (
                results(lambda *x, f=function, o=option: f(*x, use_kernel=False, **o), arrays)
                for function in (upstream, ours)
            )
            reference = f"deltatune's{f' with {option}' if option else ''}"
            difference = describe_difference(actual, expected, 1e-5, reference)
            if difference is not None:
                return difference
    return None


def attention_mask(upstream: Function) -> Function:
    """Inside `segments`, a token attends only to tokens of its own document."""

    def create_attention_mask(
        h: mx.array, cache: Any = None, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        documents = trace.current().segments
        if documents is None:
            return upstream(h, cache, window_size, return_array)
        # Models of mlx-vlm pass the caches of all layers.
        if cache is not None and not (isinstance(cache, list) and all(layer_cache is None for layer_cache in cache)):
            raise ValueError("create_attention_mask: packed documents are for training; pass no cache with segments.")
        if documents.shape[1] != h.shape[1]:
            raise ValueError(f"segments are for {documents.shape[1]:,} positions, and the model runs {h.shape[1]:,}.")
        return segments.attention_mask(documents, window_size, read=return_array)

    return create_attention_mask


def same_masks(upstream: Function, ours: Function) -> str | None:
    """Compare masks with the definition: of whole rows, of a window, and of a packed row with one document."""
    at = mx.arange(LENGTH)
    x = layer_input()
    window = causal() & (at[:, None] < at + 3)
    with segments.segments(mx.zeros((1, LENGTH), mx.int32)):
        packed = ours(x, None, None, True), ours(x, None, 3, True)
    actual = [upstream(x, None, None, True), upstream(x, None, 3, True), *packed]
    if upstream(x) != "causal":
        return "it does not return 'causal' for rows without a cache."
    expected = [causal(), window, causal()[None, None], window[None, None]]
    return describe_difference(
        [mx.squeeze(m) for m in actual], [mx.squeeze(m) for m in expected], 1e-6, "a causal mask"
    )


class Convolution(NamedTuple):
    """A layer's last causal convolution of x [B, K - 1 + T, C] with filters [C, K], for the nn.silu behind it.

    `segments` [B, T] are the documents that it kept separate, or None.
    """

    x: mx.array
    weight: mx.array
    segments: mx.array | None


def _noted(conv: Any, x: mx.array, y: mx.array, documents: mx.array | None = None) -> mx.array:
    """Note the output y of conv(x) in training, for nn.silu (pointwise.py). Returns y."""
    known = trace.current().known
    known.forget(Convolution)
    if (PASSES.is_for_here or keeps_inputs_alone()) and conv.training and "bias" not in conv:
        known.note(y, Convolution(x, conv.weight[..., 0], documents))
    return y


def _conv1d(upstream: Function) -> Function:
    """Inside `segments`, a causal depthwise convolution starts anew with each document. On a CPU it is also faster."""

    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        before = self.weight.shape[1] - 1
        documents = segments.last_segments(x.shape[1] - before)
        if documents is None and not self.training:
            return upstream(self, x)
        plain = (self.stride, self.padding, self.dilation) == (1, 0, 1)
        causal = plain and before > 0 and self.groups == self.weight.shape[0] == x.shape[-1]
        if documents is None:
            y = _taps(self, x) if causal and is_faster() else upstream(self, x)
            return _noted(self, x, y) if causal else y
        if before == 0:
            return upstream(self, x)
        if not (causal and x.shape[1] == documents.shape[1] + before):
            raise ValueError(
                f"{self!r} cannot keep packed documents separate on input {x.shape}: only causal depthwise "
                "convolutions of [state, x] can start anew with each document. Train this model without packing."
            )
        # The rows before the first token are zeros, or those that a piece of the same document hands on.
        return _noted(self, x, _taps(self, x, documents), documents)

    return __call__


def _taps(conv: Any, x: mx.array, documents: mx.array | None = None) -> mx.array:
    """conv(x), x [B, T, C], in fewer passes over memory than MLX's grouped convolution makes on a CPU."""
    before = conv.weight.shape[1] - 1
    state = x[:, :before]
    weight = conv.weight[..., 0]
    bias = conv.bias if "bias" in conv else None
    return causal_conv(x[:, before:], weight, bias, initial_state=state, segments=documents)


# The fields that the records of this function share, in either package.
ATTENTION_MASK: dict[str, Any] = {
    "name": "create_attention_mask",
    "reason": "packed documents must not attend to one another",
    "without": MIXED,
    "needed_for": (PACKING,),
    "replacement": attention_mask,
    "check": same_masks,
}

UPDATE_OF_LAYERS: dict[str, Any] = {
    "name": "gated_delta_update",
    # Versions differ in parameters; the check says which are known.
    "signature": "",
    "reason": "a training forward runs a loop or a scan over tokens, an eval forward a kernel without a gradient",
    "without": "These layers then train with upstream's loop over tokens, which is right, but slow and needs much "
    "memory, and they cannot keep packed documents separate.",
    "needed_for": (TRAINING, PACKING),
    "replacement": recurrence.update,
    "check": _same_update,
}

PATCHES = (
    Patch(**UPDATE_OF_LAYERS, module="mlx_lm.models.gated_delta"),
    Patch(**ATTENTION_MASK, module="mlx_lm.models.base"),
    Patch(
        module="mlx.nn.layers.convolution",
        name="Conv1d.__call__",
        reason="the short convolution of a packed document must not see the document before it; a CPU trains faster",
        without=MIXED,
        needed_for=(PACKING,),
        replacement=_conv1d,
        check=same_layer(layer_input, build=lambda cls: cls(WIDTH, WIDTH, 3, groups=WIDTH)),
    ),
)


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


RESIDUAL_WEIGHTS = (
    *_records("mlx_lm.models.kimi_k3", "(self, inputs, cache=None)"),
    *_records("mlx_vlm.models.kimi_k3.language", "(self, inputs, cache=None, inputs_embeds=None)"),
)
