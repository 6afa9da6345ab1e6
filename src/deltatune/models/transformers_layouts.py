"""Reads what transformers 5 saves in another form than mlx-lm takes.

Transformers 5 writes one tensor for each matrix of each expert, gives a language model that was saved without its
vision tower a model_type of its own (`qwen3_5_text`), keeps the options of rotary positions in `rope_parameters`, and
lists the kind of every layer in place of an interval. Its own names of kimi_linear, olmo_hybrid and bailing_hybrid
become again those of the released checkpoints only in part (transformers.conversion_mapping).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx_lm.utils

_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<rest>(?:gate|up|down)_proj\.\w+)$")
# Kimi's dense layers are saved under the name of the sparse ones.
_DENSE = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
_NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}


def with_known_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the model_type that mlx-lm knows, where transformers adds `_text` to that.

    Args:
        config: The content of config.json, with a model_type that is the name of a module.
    """
    name: str = config["model_type"]
    known = name in mlx_lm.utils.MODEL_REMAPPING or importlib.util.find_spec(f"mlx_lm.models.{name}") is not None
    if _is_bailing(config):
        return {**config, "architectures": ["BailingMoeV3ForCausalLM"]}
    return dict(config) if known else {**config, "model_type": name.removesuffix("_text")}


def _is_bailing(config: Mapping[str, Any]) -> bool:
    """Whether transformers itself wrote a config of bailing_hybrid, in which `head_dim` is that of rotary positions."""
    return config.get("model_type") == "bailing_hybrid" and "linear_head_dim" in config


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which the options that mlx-lm reads stand beside those of transformers 5.

    Args:
        config: The content of config.json. What it says already stays, but for bailing_hybrid's `head_dim`.
    """
    complete = {**_implied(config), **config}
    if _is_bailing(config):
        complete["head_dim"] = config["linear_head_dim"]
    text = config.get("text_config")
    return complete | {"text_config": _implied(text) | text} if isinstance(text, dict) else complete


def as_written(loaded: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config `loaded` after loading without what `completed` added to `config`.

    A run is thereby continued whichever version of deltatune began it.
    """
    added = completed(config).keys() - config.keys()
    without_added = {key: value for key, value in loaded.items() if key not in added}
    return without_added | {key: config[key] for key in ("text_config", "head_dim") if key in config}


def _implied(part: Mapping[str, Any]) -> dict[str, Any]:
    implied: dict[str, Any] = {}
    rope = part.get("rope_parameters")
    if isinstance(rope, dict):
        implied = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        if rope.get("rope_type", "default") != "default":
            implied["rope_scaling"] = rope
    kinds = part.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:
        interval = kinds.index("full_attention") + 1
        places = range(1, len(kinds) + 1)
        if kinds == ["linear_attention" if place % interval else "full_attention" for place in places]:
            implied["full_attention_interval"] = interval
    mixers = part.get("mlp_layer_types")
    if isinstance(mixers, list):
        implied["first_k_dense_replace"] = mixers.count("dense")
    if part.get("model_type") == "kimi_linear":
        # The class of transformers has no rotary positions, and so no options of them.
        implied |= {"rope_theta": 10000.0, "mla_use_nope": True}
    if _is_bailing(part):
        implied |= {
            "n_group": part.get("num_expert_group"),
            "num_experts_per_tok": part.get("num_experts_per_token"),
            "moe_shared_expert_intermediate_size": part.get("moe_intermediate_size"),
            "q_lora_rank": None,
        }
    return implied


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
        tensors: What `sanitize` returned. A matrix of one expert is named BLOCK.experts.N.up_proj.weight.

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
