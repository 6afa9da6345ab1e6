"""Completes a config.json as transformers 5 saves it by the keys that mlx-lm and mlx-vlm read.

Transformers 5 keeps the options of rotary positions in `rope_parameters`, for each kind of layer its own where they
differ. It lists the kind of every layer in place of an interval, and gives a language model that was saved without its
vision tower a model_type of its own (`qwen3_5_text`). Its class for the model_type knows the default of every key that
the file leaves out.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .. import upstream
from ..errors import UserError, reason

_TEXT = "text_config"
_FULL = "full_attention"
_SLIDING = "sliding_attention"
# The options of mlx-lm for which transformers has none, because every model of the family has the same.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": True, "qk_norm": True},
    # Released models have no rotary positions, and no shared expert.
    "kimi_linear": {"rope_theta": 10000.0, "mla_use_nope": True},
    "minimax": {"shared_intermediate_size": 0},
    "minimax_m2": {"shared_intermediate_size": 0},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
# The layers with a state have one name in transformers 5, and another in mlx-lm's models of these families.
_KINDS = {
    "granitemoehybrid": {"linear_attention": "mamba", _FULL: "attention"},
    "jamba": {"linear_attention": "mamba", _FULL: "attention"},
    "nemotron_h": {"linear_attention": "mamba", _FULL: "attention"},
}
# The errors of a class of transformers for a config that it was not made for.
_REFUSALS = (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError)

Config = Mapping[str, Any]
# The errors of code that builds a model from a config that it was not made for.
BUILD_ERRORS = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, FileNotFoundError)


def text_part(config: Config) -> Config:
    """Return the part of a config that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and "model_type" in text else config


@contextmanager
def refusing_config(refusal: str) -> Iterator[None]:
    """Turn the errors of code that builds a model from a config into a UserError, which begins with `refusal`."""
    try:
        yield
    except UserError:
        raise
    except BUILD_ERRORS as error:
        raise UserError(f"{refusal}: {reason(error)}") from error


def with_known_type(config: Config) -> dict[str, Any]:
    """Return a config with mlx-lm's model_type, where transformers adds `_text` to it."""
    name: str = config["model_type"]
    known = name in mlx_lm.utils.MODEL_REMAPPING or importlib.util.find_spec(f"mlx_lm.models.{name}") is not None
    if _is_bailing(config):
        return {**config, "architectures": ["BailingMoeV3ForCausalLM"]}
    return dict(config) if known else {**config, "model_type": name.removesuffix("_text")}


def completed(config: Config) -> dict[str, Any]:
    """Return a config in which the options that mlx-lm and mlx-vlm read stand beside those of transformers 5.

    Its options stay, except the names of kinds of layers, the model_type of a vision tower, bailing_hybrid's
    `head_dim`, and nemotron_h's `time_step_limit`. UserError for positions of sliding windows that mlx-lm's model
    cannot scale.
    """
    version = re.match(r"\d+", str(config.get("transformers_version")))
    # A key that such a file leaves out has the default of transformers' class.
    by_transformers = version is not None and int(version[0]) >= 5
    native = _native(config)
    fields = _fields(config)
    text = config.get("text_config")
    # A class with a text part takes a config without one as that part, and does not show its fields.
    complete = _part(config, native, None if "text_config" in fields and text is None else fields, by_transformers)
    if isinstance(text, dict):
        native_text = getattr(native, "text_config", None)
        # Options beside the text part hold for the text too: its class does not know that.
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        complete["text_config"] = _part(text, native_text, None, by_transformers, outer)
        if "model_type" in text:
            _check_sliding_positions(text, _fields(text))
        for name in fields:
            if name not in config and name in text:
                complete[name] = text[name]
    else:
        _check_sliding_positions(config, fields)
    vision = config.get("vision_config")
    if isinstance(vision, dict) and vision.get("model_type") == f"{config['model_type']}_vision":
        complete["vision_config"] = {**vision, "model_type": config["model_type"]}
    return complete


def transformers_values(part: Config) -> dict[str, Any]:
    """Return the options of a config, or of its text part, with transformers' own values for those that it leaves out.

    Where transformers' class does not know the model or refuses the config, they are those of the config alone.
    """
    return {**part, **_values(_native(part))}


def _check_sliding_positions(part: Config, fields: Mapping[str, Any]) -> None:
    """Refuse rope_parameters that no option of mlx-lm's model can express (UserError)."""
    rope = part.get("rope_parameters")
    local = rope.get(_SLIDING) if isinstance(rope, dict) else None
    if not isinstance(local, dict) or not fields or "rope_parameters" in fields or "text_config" in fields:
        # Where the class of the text part is not known, known_faults.py looks at the model itself.
        return
    kind = local.get("rope_type", local.get("type", "default"))
    full = rope.get(_FULL)  # type: ignore[union-attr]
    theta = full.get("rope_theta") if isinstance(full, dict) else None
    own_theta = "rope_local_base_freq" in fields or local.get("rope_theta", theta) == theta
    if kind != "default" or not own_theta:
        raise UserError(
            f"config.json: rope_parameters gives {_SLIDING} rope_type {kind!r} and rope_theta "
            f"{local.get('rope_theta')}, and mlx-lm's {part['model_type']} has no option for these; expected rope_type "
            "'default'" + (f" and the rope_theta of {_FULL}" if "rope_local_base_freq" not in fields else "") + "."
        )


def _is_bailing(config: Config) -> bool:
    """Whether transformers itself wrote a config of bailing_hybrid, in which `head_dim` is that of rotary positions."""
    return config.get("model_type") == "bailing_hybrid" and "linear_head_dim" in config


def _native(config: Config) -> Any:
    """Transformers' own config object, to read, or None where its class does not know the model or refuses the keys."""
    return _native_of(json.dumps(config))


# A command asks for that of one model six times, and it takes ten milliseconds.
@lru_cache(maxsize=8)
def _native_of(text: str) -> Any:
    config = json.loads(text)
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    native = CONFIG_MAPPING[kind]
    if _TEXT in native.sub_configs and _TEXT not in config:
        # All of such a config is the text part, of which the class would take its own defaults.
        native = native.sub_configs[_TEXT]
    try:
        return native.from_dict(config)
    except _REFUSALS:
        # mlx-lm names the keys that it misses.
        return None


def _arguments(config: Config) -> Any:
    """mlx-lm's class of arguments, or None where mlx-lm does not know the model."""
    try:
        return upstream.model_classes(with_known_type(config))[1]
    except (ValueError, AttributeError):
        return None


def _fields(config: Config) -> dict[str, dataclasses.Field[Any]]:
    arguments = _arguments(config)
    return {field.name: field for field in dataclasses.fields(arguments)} if dataclasses.is_dataclass(arguments) else {}


def _part(
    part: Config,
    native: Any,
    fields: dict[str, dataclasses.Field[Any]] | None,
    by_transformers: bool,
    outer: Config | None = None,
) -> dict[str, Any]:
    """Complete a config, or its text part, of which no fields are known."""
    renamed = _in_old_names(part, native, fields or {})
    values = {**_values(native), **renamed, **(outer or {})}
    complete = dict(part)
    for name in values if fields is None else {**fields, **renamed}:
        if name in part:
            continue
        field = None if fields is None else fields.get(name)
        if name in values and (by_transformers or name in renamed):
            complete[name] = copy.deepcopy(values[name])
        elif by_transformers and field is not None and "Optional" in str(field.type) and _is_required(field):
            complete[name] = None
    if complete.get("position_embedding_type", "") is None:
        # Granite's hybrids without rotary positions; mlx-lm takes every other value for rotary ones.
        complete["position_embedding_type"] = "nope"
    names = _KINDS.get(part.get("model_type", ""), {})
    for key in ("layer_types", "layers_block_type", "mtp_layers_block_type"):
        if isinstance(complete.get(key), list):
            complete[key] = [names.get(kind, kind) for kind in complete[key]]
    if isinstance(part.get("sliding_window_pattern"), int) and isinstance(renamed.get("sliding_window_pattern"), str):
        complete["sliding_window_pattern"] = renamed["sliding_window_pattern"]
    if _is_bailing(part):
        complete["head_dim"] = part["linear_head_dim"]
        # mlx-lm's own default is a rank, and transformers before 5.24 has none.
        complete["q_lora_rank"] = part.get("q_lora_rank")
    if by_transformers and part.get("model_type") == "nemotron_h":
        # Transformers' model bounds time steps by this alone, and leaves out time_step_limit, which it saves too.
        complete["time_step_limit"] = [values["time_step_min"], math.inf]
    return complete


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _values(native: Any) -> dict[str, Any]:
    """The values of transformers' object by its own names, and by those that it takes for the same."""
    if native is None:
        return {}
    values = native.to_dict()
    values |= {other: values[name] for other, name in native.attribute_map.items() if name in values}
    return {name: value for name, value in values.items() if name not in ("model_type", "transformers_version")}


def _in_old_names(part: Config, native: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options that mlx-lm reads under names unknown to transformers 5."""
    values = dict(_OF_FAMILY.get(part.get("model_type", ""), {}))
    rope = part.get("rope_parameters") or getattr(native, "rope_parameters", None)
    if isinstance(rope, dict):
        values |= _rope_in_old_names(rope, part)
    values |= _kinds_in_old_names(part, native, fields)
    others = {
        "n_ctx": "n_positions",
        "block_dim": "hidden_size",
        "moe_shared_expert_intermediate_size": "moe_intermediate_size",
    }
    for old, new in others.items():
        if (value := part.get(new)) is not None:
            values[old] = value
    heads, width = part.get("num_attention_heads"), part.get("hidden_size")
    if native is not None and "head_dim" not in native.to_dict() and isinstance(heads, int) and isinstance(width, int):
        values["head_dim"] = width // heads
    if "expand" in part and isinstance(width, int):
        values["intermediate_size"] = int(part["expand"] * width)
    return values


def _rope_in_old_names(rope: dict[str, Any], part: Config) -> dict[str, Any]:
    """The options of rotary positions as mlx-lm reads them beside `rope_parameters`."""
    options = rope.get(_FULL, rope)
    if not isinstance(options, dict):
        return {}
    values = {key: options[key] for key in ("rope_theta", "partial_rotary_factor") if options.get(key) is not None}
    is_plain = options.get("rope_type", options.get("type", "default")) == "default"
    values["rope_scaling"] = (
        None if is_plain and "mrope_section" not in options else {"type": options.get("rope_type"), **options}
    )
    if "rope_theta" in values:
        values["rotary_emb_base"] = values["rope_theta"]
    if isinstance(local := rope.get(_SLIDING), dict) and "rope_theta" in local:
        values["rope_local_base_freq"] = local["rope_theta"]
    if (share := values.get("partial_rotary_factor")) is not None:
        values["rotary_pct"] = share
    width = part.get("head_dim")
    if width is None and "num_attention_heads" in part and "hidden_size" in part:
        width = part["hidden_size"] // part["num_attention_heads"]
    if width is not None:
        values["rotary_dim"] = int(width * (1.0 if share is None else share))
    return values


def _kinds_in_old_names(part: Config, native: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The intervals and lists that mlx-lm reads in place of the kind of every layer."""
    values: dict[str, Any] = {}
    kinds = part.get("layer_types")
    if isinstance(kinds, list):
        interval = _interval_of(kinds)
        field = fields.get("sliding_window_pattern")
        if set(kinds) <= {_FULL, _SLIDING} and field is not None and "str" in str(field.type):
            # A word of L and G for each layer.
            values["sliding_window_pattern"] = "".join("L" if kind == _SLIDING else "G" for kind in kinds)
        elif set(kinds) <= {_FULL, _SLIDING} and interval is not None:
            values["sliding_window_pattern"] = interval
        if _FULL in kinds and set(kinds) <= {_FULL, "linear_attention"} and interval is not None:
            values["full_attention_interval"] = interval
    mixers = part.get("mlp_layer_types") or getattr(native, "mlp_layer_types", None)
    if isinstance(mixers, list):
        values["first_k_dense_replace"] = mixers.count("dense")
        values["is_moe_layer"] = [mixer == "sparse" for mixer in mixers]
    return values


def _interval_of(kinds: list[str]) -> int | None:
    """Return after how many layers one is full; None where that differs."""
    interval = kinds.index(_FULL) + 1 if _FULL in kinds else len(kinds) + 1
    regular = all((kind == _FULL) == (place % interval == 0) for place, kind in enumerate(kinds, 1))
    return interval if regular else None


_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<rest>(?:gate|up|down)_proj\.\w+)$")
# Kimi's dense layers are saved under the name of the sparse ones.
_DENSE = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
_NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}


def with_released_names(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors of a checkpoint under the names of the released ones, where transformers saves others.

    These are the dense layers of kimi_linear, the norms of olmo_hybrid, the output projections of bailing_hybrid's
    gated-delta layers, and convolutions of the widths of q, k and v: transformers joins those, and saves equal thirds.
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
    """Stack the tensors of single experts that a model's `sanitize` has left: BLOCK.experts.N.up_proj.weight each.

    They become BLOCK.switch_mlp.up_proj.weight [experts, out, in]. KeyError for an expert that is missing below others.
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


# Options that change logits without changing the shape of a tensor, so that nothing else would show that they are lost.
_CHANGING = (
    "activation_function",
    "attn_logit_softcapping",
    "attention_multiplier",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "logit_scale",
    "logits_scaling",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    "use_bidirectional_attention",
)
# Names of functions that are the same, or differ by 0.1 % (known_faults.py names the families where they do).
_GELUS = ("gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate")
_ALIKE = {"swish": "silu", **dict.fromkeys(_GELUS, "gelu")}


def check_options(config: Config) -> None:
    """Refuse a config with an option unlike the default of transformers' class that mlx-lm's model does not read."""
    part = text_part(config)
    differing = [name for name in _CHANGING if part.get(name) is not None]
    native = _native(part) if differing else None
    try:
        defaults = {} if native is None else _values(type(native)())
    except _REFUSALS:
        return
    values = _values(native)
    for name in differing:
        changes = name in defaults and _plain(values[name]) != _plain(defaults[name])
        if changes and name not in _declared(part):
            raise UserError(
                f"config.json: it sets {name} to {values[name]!r}, and mlx-lm's {part.get('model_type')} computes with "
                f"{defaults[name]!r} whatever it is: its logits would not be those of transformers. Train another "
                f"model, or remove {name} to train this one as mlx-lm computes it."
            )


def _declared(part: Config) -> set[str]:
    """The options that classes of arguments declare in the module of mlx-lm's model, and in those it imports."""
    arguments = _arguments(part)
    module = sys.modules[arguments.__module__] if arguments is not None else None
    values = list(vars(module).values()) if module is not None else []
    imported = [value for value in values if inspect.ismodule(value) and "mlx_lm.models" in value.__name__]
    values += [value for source in imported for value in vars(source).values()]
    return {field.name for value in values if dataclasses.is_dataclass(value) for field in dataclasses.fields(value)}


def _plain(value: object) -> object:
    return _ALIKE.get(value, value) if isinstance(value, str) else value
