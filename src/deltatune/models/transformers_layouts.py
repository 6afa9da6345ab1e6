"""Reads what transformers 5 saves in another form than mlx-lm takes.

Transformers 5 writes one tensor for each matrix of each expert, gives a language model that was saved without its
vision tower a model_type of its own (`qwen3_5_text`), keeps the options of rotary positions in `rope_parameters`, and
lists the kind of every layer in place of an interval.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx_lm.utils

_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<rest>(?:gate|up|down)_proj\.\w+)$")


def with_known_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the model_type that mlx-lm knows, where transformers adds `_text` to that.

    Args:
        config: The content of config.json, with a model_type that is the name of a module.
    """
    name: str = config["model_type"]
    known = name in mlx_lm.utils.MODEL_REMAPPING or importlib.util.find_spec(f"mlx_lm.models.{name}") is not None
    return dict(config) if known else {**config, "model_type": name.removesuffix("_text")}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which the options that mlx-lm reads stand beside those of transformers 5.

    Args:
        config: The content of config.json. What it says already stays.
    """
    own = {**_implied(config), **config}
    text = config.get("text_config")
    return own | {"text_config": _implied(text) | text} if isinstance(text, dict) else own


def as_written(found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config `found` after loading without what `completed` added to `config`.

    A run is thereby continued whichever version of deltatune began it.
    """
    added = completed(config).keys() - config.keys()
    kept = {key: value for key, value in found.items() if key not in added}
    return kept | {key: config[key] for key in ("text_config",) if key in config}


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
    return implied


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
