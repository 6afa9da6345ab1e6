"""Known faults of mlx-lm's models: where their logits are not those of transformers, and in rows of which length.

tests/oracle/test_known_faults.py shows each of them on tiny models beside torch, and fails where mlx-lm has mended one.

Many families have rotary positions without any scaling, and would ignore that of config.json silently: it is refused.
The class of YaRN positions in mlx-lm has no option for `truncate` and `attention_factor`, and another default than
transformers for `original_max_position_embeddings`: it gets transformers' numbers.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import YarnRoPE

from .. import upstream
from ..errors import UserError
from ..ops.random_state import drawing_from
from .transformers_configs import Config, text_part, transformers_values

_ALL = range(1, sys.maxsize)


class KnownFault(NamedTuple):
    """A fault: the model's difference from transformers in words, and the lengths of the rows that are wrong, in
    tokens. Training and evaluation are `refused` where their losses would be those of no model.
    """

    sentence: str
    lengths: range
    refused: bool


def _beyond_window(values: Config) -> range | None:
    """Rows beyond the window of the layers that have one: those of a kind, or all where a family has no kinds."""
    kinds = values.get("layer_types")
    window = values.get("sliding_window")
    if not window or (kinds and "sliding_attention" not in kinds):
        return None
    return range(window + 1, sys.maxsize)


def _up_to_original_length(values: Config) -> range | None:
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type") != "longrope" or rope["short_factor"] == rope["long_factor"]:
        return None
    return range(1, rope["original_max_position_embeddings"] + 1)


def _where(is_wrong: Callable[[Config], bool]) -> Callable[[Config], range | None]:
    return lambda values: _ALL if is_wrong(values) else None


def _rotated_share(values: Config) -> Any:
    rope = values.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))


_some_experts = _where(lambda values: values.get("num_experts_per_tok", 1) < values.get("num_experts", 1))
# Their losses would be those of no model.
_REFUSED = {"gemma3n", "gemma3n_text"}
_WITHOUT_WINDOW = {"dots1", "gemma2", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe"}
_WITHOUT_WINDOW |= {"qwen3", "qwen3_moe", "starcoder2"}
_OTHER_GELU = "computes another GELU than config.json asks for: logits differ by some 0.1 %"
# For each fault the families that have it, which are all where none is named, a function that reads from a config which
# rows are wrong, and a sentence: `first` is the length of the longest row before those, and `last` of the longest one.
_FAULTS: tuple[tuple[set[str], Callable[[Config], range | None], str], ...] = (
    (
        _WITHOUT_WINDOW,
        _beyond_window,
        "has no sliding window: beyond {first:,} tokens its logits are not those of transformers, where a token sees "
        "the last {first:,} alone",
    ),
    (
        set(),
        _up_to_original_length,
        "scales positions by long_factor in rows of any length, and transformers by short_factor in rows of up to "
        "{last:,} tokens",
    ),
    (
        {"jamba"},
        _some_experts,
        "takes the softmax of the chosen experts' scores alone, and transformers that of all experts' scores: the "
        "experts weigh more than they should",
    ),
    (
        {"ernie4_5_moe"},
        _some_experts,
        "leaves out e_score_correction_bias, which transformers adds to the scores by which experts are chosen",
    ),
    (
        {"falcon_h1"},
        _where(lambda values: values.get("key_multiplier", 1.0) != 1.0),
        "leaves out key_multiplier, by which transformers multiplies the keys of attention",
    ),
    (
        {"falcon_h1", "mamba2"},
        _where(lambda v: v.get("mamba_rms_norm", True) and (v.get("n_groups") or v.get("mamba_n_groups") or 1) > 1),
        "normalises the output of a mixer over all of its heads, and transformers over those of a group alone",
    ),
    (
        {"glm"},
        _where(lambda values: _rotated_share(values) != 1.0),
        "rotates a whole head by the token's position, and transformers the share partial_rotary_factor of it",
    ),
    (
        {"gemma", "gpt_bigcode", "starcoder2"},
        _where(lambda values: values.get("hidden_act", values.get("activation_function", "gelu")) != "gelu"),
        _OTHER_GELU,
    ),
    ({"gpt_neox"}, _where(lambda values: values.get("hidden_act") == "gelu"), _OTHER_GELU),
    (
        {"qwen2_moe"},
        _where(lambda values: bool(values.get("norm_topk_prob"))),
        "does not divide the weights of the chosen experts by their sum, as transformers does where norm_topk_prob is "
        "true",
    ),
    (
        _REFUSED,
        _where(lambda values: bool(values.get("num_kv_shared_layers"))),
        "computes keys and values of its last layers by their own projections, which no model was trained with, and "
        "transformers takes those of an earlier layer; with the cache of generation both do",
    ),
)


def known_faults(config: Config) -> list[KnownFault]:
    """Return the known faults of mlx-lm's model for the content of a config.json."""
    part = text_part(config)
    family = str(part.get("model_type"))
    values = transformers_values(part)
    faults = []
    for families, rows, sentence in _FAULTS:
        lengths = rows(values) if not families or family in families else None
        if lengths is not None:
            words = sentence.format(first=lengths.start - 1, last=lengths.stop - 1)
            faults.append(KnownFault(f"mlx-lm's {family} {words}.", lengths, family in _REFUSED))
    return faults


def fault_notes(model: nn.Module, config: Config, lengths: Iterable[int]) -> list[str]:
    """Return a note for each known fault of mlx-lm's model that rows of these lengths, in tokens, reach.

    The lengths are read only where the model has a fault. UserError where its losses are wrong in every row; mlx-vlm's
    model has that fault too.
    """
    faults = known_faults(config)
    if refused := next((fault for fault in faults if fault.refused), None):
        raise UserError(f"{refused.sentence[:-1]}. Train another model; this one can be used to generate.")
    faults = faults if type(model).__module__.startswith("mlx_lm.") else []
    rows = list(lengths) if faults else []
    notes = []
    for fault in faults:
        count = sum(length in fault.lengths for length in rows)
        if count:
            reached = "" if fault.lengths == _ALL else f" Of {len(rows):,} rows it reaches {count:,}."
            notes.append(f"Note: {fault.sentence}{reached}")
    return notes


# Types of positions that no factor scales, or that a family's only model has.
_UNSCALED = {"default", "mrope", "proportional", "axial"}
# The options of a scaling beside its type.
_SCALING = {
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
}
# Private arrays of a module that are larger are not compared: frequencies have one number for each two of a head.
_LARGEST_ARRAY = 1 << 14
# The relative difference of two computations of a frequency in fp32: a power, and six operations.
_ROUNDING = 1e-5


def check_scaling(config: Config, build: Callable[[Config], nn.Module]) -> None:
    """Refuse a completed config with scaled positions where mlx-lm's model is the same without the scaling.

    `build` makes the model of a config, with random weights that are not evaluated.
    """
    part = text_part(config)
    asked = next(_scalings(part), None)
    if asked is None:
        return
    if _type(asked) == "longrope":
        _check_longrope(part)
    with drawing_from(mx.random.key(0)):
        try:
            ignored = _positions(build(_without_scaling(config))) == _positions(build(config))
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            # A model that cannot be built without the scaling reads it; one that cannot be built with it fails later.
            return
    if not ignored:
        return
    kind = _type(asked)
    factor = f" by factor {asked['factor']:g}" if isinstance(asked.get("factor"), int | float) else ""
    raise UserError(
        f"config.json: it scales positions{factor} (rope type {kind!r}), and mlx-lm's {part.get('model_type')} ignores "
        "that: its logits would not be those of transformers. Remove the scaling from config.json to train the model "
        "with its original positions."
    )


def _check_longrope(part: Config) -> None:
    """UserError where transformers gives longrope another scale than mlx-lm, which computes one from two lengths."""
    values = transformers_values(part)
    options = values.get("rope_parameters")
    if not isinstance(options, dict) or "original_max_position_embeddings" not in options:
        return
    original = options["original_max_position_embeddings"]
    longest = values["max_position_embeddings"]

    def scale_of(factor: float) -> float:
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    used = scale_of(longest / original)
    asked = options.get("attention_factor") or scale_of(options.get("factor") or longest / original)
    if not math.isclose(asked, used, rel_tol=_ROUNDING):
        raise UserError(
            f"config.json: its longrope positions have a scale of {asked:.4f}, by attention_factor or factor, and "
            f"mlx-lm's {part.get('model_type')} takes {used:.4f}, from max_position_embeddings and "
            "original_max_position_embeddings: its logits would not be those of transformers. Remove the option where "
            "the model was trained without it; mlx-lm cannot compute it otherwise."
        )


def set_yarn(config: Config, model: nn.Module) -> None:
    """Set, in place, the frequencies and the scale of a model's YaRN positions to those of transformers, where they
    differ.
    """
    modules = [module for module in model.modules() if type(module) is YarnRoPE]
    if not modules:
        return
    values = transformers_values(text_part(config))
    scalings = _scalings({"rope_parameters": values.get("rope_parameters")})
    complete = [
        scaling
        for scaling in scalings
        if _type(scaling) == "yarn" and scaling.get("rope_theta") and scaling.get("factor")
    ]
    if len(complete) != 1:
        return
    for module in modules:
        frequencies, scale = _yarn(complete[0], module.dims, values)
        used = getattr(module, upstream.ROPE_FREQUENCIES, None)
        if not isinstance(used, mx.array) or used.shape != frequencies.shape:
            raise UserError(
                "config.json: this version of mlx-lm does not show the frequencies of its YaRN positions, which differ "
                "from those of transformers in some options; install a version that deltatune knows (deltatune doctor)."
            )
        if not np.allclose(np.array(used), frequencies, rtol=_ROUNDING, atol=0.0):
            setattr(module, upstream.ROPE_FREQUENCIES, mx.array(frequencies))
        if not math.isclose(module.mscale, scale, rel_tol=_ROUNDING):
            module.mscale = scale


def _type(scaling: Config) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _scalings(part: Config) -> Iterator[Config]:
    """Yield the options of every scaling in a config, of all layers or of one kind of them."""
    for key in ("rope_scaling", "rope_parameters"):
        options = part.get(key)
        if not isinstance(options, dict):
            continue
        kinds = [value for value in options.values() if isinstance(value, dict)]
        yield from (scaling for scaling in kinds or [options] if _type(scaling) not in _UNSCALED)


def _without_scaling(config: Config) -> dict[str, Any]:
    """Return a copy of a config in which nothing scales the positions."""
    plain = copy.deepcopy(dict(config))
    part = plain
    if text_part(config) is not config:
        part = plain["text_config"]
    if isinstance(part.get("rope_scaling"), dict):
        part["rope_scaling"] = None
    rope = part.get("rope_parameters")
    if isinstance(rope, dict):
        nested = any(isinstance(value, dict) for value in rope.values())
        for options in rope.values() if nested else [rope]:
            if isinstance(options, dict) and _type(options) not in _UNSCALED:
                for name in _SCALING & options.keys():
                    del options[name]
                options |= {"rope_type": "default", "type": "default"}
    return plain


def _positions(model: nn.Module) -> list[Any]:
    """The class, the plain attributes and the private arrays of every module, any of which a scaling may change."""
    parts: list[Any] = []
    for path, module in model.named_modules():
        attributes = [*vars(module).items(), *module.items()]
        for name, value in sorted(attributes, key=lambda item: item[0]):
            if isinstance(value, bool | int | float | str):
                parts.append((path, name, value))
            elif isinstance(value, mx.array) and name.startswith("_") and value.size <= _LARGEST_ARRAY:
                parts.append((path, name, value.tolist()))
        parts.append((path, type(module).__name__))
    return parts


def _yarn(options: Config, dims: int, values: Config) -> tuple[np.ndarray, float]:
    """The frequencies and the scale of YaRN positions. Source: transformers' modeling_rope_utils, yarn."""
    base = float(options["rope_theta"])
    factor = float(options["factor"])
    original = options.get("original_max_position_embeddings") or values["max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def scale_of(amount: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * amount * math.log(factor) + 1.0

    low = dimension(options.get("beta_fast") or 32)
    high = dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
    wavelengths = base ** (np.arange(0, dims, 2) / dims)
    frequencies = wavelengths / (1 - interpolated + interpolated / factor)
    numerator = options.get("mscale")
    denominator = options.get("mscale_all_dim")
    scale = options.get("attention_factor")
    if scale is None:
        scale = scale_of(numerator) / scale_of(denominator) if numerator and denominator else scale_of(1)
    return frequencies.astype(np.float32), float(scale)
