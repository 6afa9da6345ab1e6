"""Reads tensors that transformers 5 saves in another form than mlx-lm takes.

Transformers 5 writes one tensor for each matrix of each expert. Its own names of kimi_linear, olmo_hybrid and
bailing_hybrid become again those of the released checkpoints only in part (transformers.conversion_mapping).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import mlx.core as mx

_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<rest>(?:gate|up|down)_proj\.\w+)$")
# Kimi's dense layers are saved under the name of the sparse ones.
_DENSE = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
_NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}


def with_released_names(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors under the names of the released checkpoints, where transformers saves others.

    Args:
        tensors: The tensors of a checkpoint, as stored.

    Returns:
        The same, with the dense layers of kimi_linear, the norms of olmo_hybrid, the output projections of
        bailing_hybrid's gated-delta layers, and convolutions of the widths of q, k and v: transformers joins those, and
        saves equal thirds.
    """
    renamed: dict[str, mx.array] = {}
    hybrid = any(name.endswith(".linear_attn.A_log") for name in tensors)
    for name, tensor in tensors.items():
        new = _DENSE.sub(".mlp.", name)
        for norm, usual in _NORMS.items() if hybrid else ():
            new = new.replace(norm, usual)
        layer, middle, leaf = name.partition(".attention.dense.")
        if middle and f"{layer}.attention.A_log" in tensors:
            new = f"{layer}.attention.o_proj.{leaf}"
        renamed[new] = tensor
    for bias in [name for name in renamed if name.endswith(".experts.gate_up_proj_bias")]:
        # gpt-oss without quantisation: [experts, in, out].
        for name in (bias.removesuffix("_bias"), bias.replace("gate_up_proj_bias", "down_proj")):
            if name in renamed:
                renamed[f"{name}.weight"] = renamed.pop(name).swapaxes(-1, -2)
    for name in [name for name in renamed if name.endswith(".q_conv1d.weight")]:
        _cut_convolutions(renamed, name.removesuffix("q_conv1d.weight"))
    return renamed


def _cut_convolutions(tensors: dict[str, mx.array], mixer: str) -> None:
    """Give the convolutions of a mixer as many channels as its projections have rows."""
    convolutions = [f"{mixer}{part}_conv1d.weight" for part in "qkv"]
    projections = [f"{mixer}{part}_proj.weight" for part in "qkv"]
    if not set(convolutions + projections) <= tensors.keys():
        return
    channels, rows = ([tensors[name].shape[0] for name in names] for names in (convolutions, projections))
    if channels == rows or sum(channels) != sum(rows):
        return
    joined = mx.concatenate([tensors[name] for name in convolutions])
    tensors |= dict(zip(convolutions, mx.split(joined, [rows[0], rows[0] + rows[1]]), strict=True))


def with_joined_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Stack the tensors of single experts that a model's `sanitize` has left as they were.

    Args:
        tensors: The result of `sanitize`. A matrix of one expert is named BLOCK.experts.N.up_proj.weight.

    Returns:
        The tensors, with BLOCK.switch_mlp.up_proj.weight [experts, out, in] in the place of those of single experts.

    Raises:
        KeyError: The tensor of an expert is missing, and others of a higher number are there.
    """
    joined: dict[str, mx.array] = {}
    single: dict[str, dict[int, str]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            joined[name] = tensor
        else:
            single.setdefault(f"{match['block']}.switch_mlp.{match['rest']}", {})[int(match["expert"])] = name
    for name, experts in single.items():
        for expert in range(max(experts) + 1):
            if expert not in experts:
                raise KeyError(experts[max(experts)].replace(f".experts.{max(experts)}.", f".experts.{expert}."))
        joined[name] = mx.stack([tensors[experts[expert]] for expert in range(len(experts))])
    return joined
