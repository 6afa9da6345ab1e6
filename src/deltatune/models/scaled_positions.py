"""Refuses scaled positions that mlx-lm's model ignores, and computes YaRN's as transformers does.

Many families of mlx-lm have rotary positions without any scaling, and would ignore that of config.json silently. The
class of YaRN positions in mlx-lm has no option for `truncate` and `attention_factor`, and another default than
transformers for `original_max_position_embeddings`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import YarnRoPE

from .. import upstream
from ..errors import UserError
from ..ops.random_state import drawing_from
from .transformers_configs import Config, text_part, transformers_values

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
