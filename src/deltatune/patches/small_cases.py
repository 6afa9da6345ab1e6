"""Small cases on which a record compares upstream's function with deltatune's: the results and every gradient.

The layers are built by upstream's own constructors, from the options of a model of a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..ops.functional import as_list, is_floating
from ..ops.operator.measure import largest_error
from ..ops.recomputation import cheap_recomputed, small_cases
from ..ops.tracing import trace
from .patch_record import Check, Function
from .whole_rows import whole_rows

# fp32 rounds each of at most some thousand operations by 6e-8; a changed formula differs by far more.
BOUND = 1e-4

WIDTH = 16
LENGTH = 5

_OPTIONS: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_traditional": False,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "rope_interleave": True,
    "full_attention_interval": 2,
    "query_pre_attn_scalar": 8.0,
    "attn_logit_softcapping": 50.0,
    # The gated-delta layers.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "short_conv_kernel_size": 4,
    "layer_group_size": 2,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    # The latent attention.
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    # The experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "score_function": "sigmoid",
    "routed_scaling_factor": 1.5,
    "num_expert_group": 1,
    "n_group": 1,
    "topk_group": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 1.5,
    "attn_res_block_size": 1,
    "routed_expert_hidden_size": 12,
    "latent_moe_use_norm": True,
    # The vision tower.
    "spatial_merge_size": 2,
    "out_hidden_size": WIDTH,
}


# Makes a layer of a class of upstream.
Build = Callable[[Any], nn.Module]


class SmallConfig:
    """The options of a small model of any family. One that is not listed above is None, as upstream's optional ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _OPTIONS.get(name)


def drawn(seed: int, *shape: int) -> mx.array:
    """Return normal numbers that depend on the seed and the shape alone."""
    return mx.random.normal(shape, key=mx.random.key(seed))


def layer_input() -> mx.array:
    """The input of a layer, [1, T, D]."""
    return drawn(0, 1, LENGTH, WIDTH)


def causal(length: int = LENGTH) -> mx.array:
    """The mask [T, T] of positions that may be seen."""
    at = mx.arange(length)
    return at[:, None] >= at


def of_config(cls: Any) -> nn.Module:
    """Build a layer with a constructor that takes only a model's options."""
    return cls(SmallConfig())


def first_layer(cls: Any) -> nn.Module:
    """Build a layer with a constructor that takes a model's options and the layer's position."""
    return cls(SmallConfig(), 0)


def class_of(method: Function) -> type[nn.Module]:
    """The class that a method of upstream belongs to."""
    return method.__globals__[method.__qualname__.partition(".")[0]]


def built(upstream: Function, build: Build) -> nn.Module:
    """Build a layer of the class of a method, with random numbers for every parameter, such as norms' ones."""
    layer = build(class_of(upstream))
    leaves: Any = tree_flatten(layer.parameters())
    layer.update(
        tree_unflatten([(name, leaf + 0.3 * drawn(at, *leaf.shape)) for at, (name, leaf) in enumerate(leaves)])
    )
    return layer


def describe_difference(
    actual: Sequence[mx.array], expected: Sequence[mx.array], bound: float, reference: str
) -> str | None:
    """The sentence that a check returns where `actual` differs from `expected`, which `reference` names; else None.

    The largest difference relative to the largest element must be below `bound`.
    """
    # All at once: waiting for each array by itself takes several times as long.
    mx.eval(actual, expected)
    error = largest_error(actual, expected)
    if error < bound:
        return None
    return f"on a small case it differs from {reference} by {error:.1e} of the largest element."


def results(function: Function, arrays: Sequence[mx.array], gradient: bool = True) -> list[mx.array]:
    """Return the outputs of function(*arrays), and the gradients for every array of floats."""
    floats = [x for x in arrays if is_floating(x)]

    def weighed(*floats: mx.array) -> tuple[mx.array, list[mx.array]]:
        values = iter(floats)
        outputs = as_list(function(*(next(values) if is_floating(x) else x for x in arrays)))
        outputs = [y for y in outputs if isinstance(y, mx.array)]
        return sum(((y * drawn(at, *y.shape)).sum() for at, y in enumerate(outputs)), mx.array(0.0)), outputs

    if not gradient:
        return weighed(*floats)[1]
    (_, outputs), gradients = mx.value_and_grad(weighed, argnums=list(range(len(floats))))(*floats)
    return [*outputs, *gradients]


@contextmanager
def serving() -> Iterator[None]:
    """Within the context deltatune's cheap operators serve, as in training, however few numbers a row has."""
    with whole_rows(), small_cases(), cheap_recomputed():
        yield


@contextmanager
def answering() -> Iterator[None]:
    """Within the context layers are called as for the next tokens of a batch, and deltatune's operators serve."""
    with small_cases(), trace.having(next_tokens=True):
        yield


def one_token() -> mx.array:
    """The input of a layer for one token of each row, [3, 1, D]."""
    return drawn(0, 3, 1, WIDTH)


def plain_norm(size: int) -> Build:
    """Build a norm, or a gated one, of so many channels."""
    return lambda cls: cls(size)


def alike(*arrays: Callable[[], mx.array], call: Callable[..., Any] | None = None, definition: Any = None) -> Check:
    """Build a check that compares a function with its replacement on `arrays`, which are made for it.

    They are all arguments unless `call` calls the function with them. `definition` is compared in place of a
    replacement that leaves such a call to upstream.
    """
    how = call or (lambda function, *arguments: function(*arguments))

    def check(upstream: Function, ours: Function) -> str | None:
        inputs = [make() for make in arrays]
        with serving():
            outputs, expected = (
                results(lambda *x, f=function: how(f, *x), inputs) for function in (upstream, definition or ours)
            )
        return describe_difference(outputs, expected, BOUND, "what deltatune computes")

    return check


def same_layer(
    *inputs: Callable[[], mx.array | None],
    build: Build = of_config,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    gradient: bool = True,
) -> Check:
    """Build a check that compares a layer's method with its replacement in training, within the context of `inside`.

    `inputs` make the arguments after `self`, and `build` a layer of the class. Gradients are those of the inputs and of
    all parameters.
    """

    def check(upstream: Function, ours: Function) -> str | None:
        layer = built(upstream, build)
        named: Any = tree_flatten(layer.trainable_parameters())
        made = [make() for make in inputs]
        arrays = [leaf for _, leaf in named] + [x for x in made if x is not None]

        def called(function: Function) -> Function:
            def call(*arrays: mx.array) -> Any:
                leaves = [(name, x) for (name, _), x in zip(named, arrays, strict=False)]
                layer.update(tree_unflatten(leaves))
                arguments = iter(arrays[len(named) :])
                return function(layer, *(None if x is None else next(arguments) for x in made))

            return call

        with inside():
            outputs, expected = (results(called(f), arrays, gradient) for f in (upstream, ours))
        return describe_difference(outputs, expected, BOUND, "what deltatune computes")

    return check
