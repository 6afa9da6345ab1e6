"""The fields of the JSON files beside a model or an adapter that deltatune, mlx-lm, mlx-vlm or transformers read.

A field of a wrong type would make one of these libraries fail far from the file. Sizes that decide the shapes of
tensors are left to the comparison of the tensors with the model, which names both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class FieldKind:
    """The values of a field: their kind in words, its test, and whether null stands for the default."""

    words: str
    fits: Callable[[Any], bool]
    null: bool = True


Fields = Mapping[str, "FieldKind | Fields"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _list_of(member: FieldKind, words: str) -> FieldKind:
    return FieldKind(f"a list of {words}", lambda value: isinstance(value, list) and all(map(member.fits, value)))


def _object_of(member: FieldKind, words: str) -> FieldKind:
    return FieldKind(
        f"an object whose values are {words}",
        lambda value: isinstance(value, dict) and all(map(member.fits, value.values())),
    )


def _either(*kinds: FieldKind) -> FieldKind:
    return FieldKind(", or ".join(kind.words for kind in kinds), lambda value: any(kind.fits(value) for kind in kinds))


TEXT = FieldKind("text", lambda value: isinstance(value, str))
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool))
NUMBER = FieldKind("a number", _is_number)
POSITIVE = FieldKind("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf)
SHARE = FieldKind("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1)
COUNT = FieldKind("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0)
SIZE = FieldKind("a whole number above 0", lambda value: _is_whole(value) and value > 0)
WHOLE = FieldKind("a whole number", _is_whole)
TEXTS = _list_of(TEXT, "texts")
NUMBERS = _list_of(NUMBER, "numbers")
_COUNTS = _list_of(COUNT, "whole numbers of 0 or more")
_SIZES = _list_of(SIZE, "whole numbers above 0")
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict))
TOKEN = FieldKind('a token: text, or an object with its "content"', _is_token)
TOKENS = _either(_list_of(TOKEN, "tokens"), _object_of(TOKEN, "tokens"))
IDS = _either(WHOLE, _list_of(WHOLE, "whole numbers"))

_SPECIAL_TOKENS: Fields = {
    **dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"), TOKEN
    ),
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"), TOKENS),
}  # fmt: skip
_IDS: Fields = {
    "eos_token_id": _either(COUNT, _COUNTS),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), IDS),
}
_ROPE: Fields = {
    **dict.fromkeys(("type", "rope_type"), TEXT),
    "rope_theta": replace(POSITIVE, null=False),
    **dict.fromkeys(("factor", "partial_rotary_factor"), POSITIVE),
    "mrope_section": FieldKind("three whole numbers above 0", lambda value: _SIZES.fits(value) and len(value) == 3),
    "mrope_interleaved": FLAG,
}
_TEXT_MODEL: Fields = {
    **_IDS,
    **dict.fromkeys(("model_type", "hidden_act", "torch_dtype", "dtype"), TEXT),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "partial_rotary_factor"), POSITIVE),
    "rope_theta": _either(POSITIVE, _list_of(POSITIVE, "numbers above 0")),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "norm_topk_prob", "attn_output_gate", "use_cache"), FLAG
    ),
    **dict.fromkeys(("full_attention_interval", "max_position_embeddings", "decoder_sparse_step", "vocab_size"), SIZE),
    "sliding_window": WHOLE,
    "layer_types": TEXTS,
    "mlp_only_layers": _COUNTS,
}  # fmt: skip
_ROPES: Fields = {"rope_scaling": _ROPE, "rope_parameters": _ROPE}
_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_MODEL: Fields = {
    **_TEXT_MODEL,
    **_ROPES,
    **dict.fromkeys(_TOKEN_IDS, COUNT),
    "architectures": TEXTS,
    "text_config": {**_TEXT_MODEL, **_ROPES},
    "vision_config": {
        "model_type": TEXT,
        "num_heads": SIZE,
        "deepstack_visual_indexes": _COUNTS,
    },
    "quantization": OBJECT,
    "quantization_config": OBJECT,
}
_TOKENIZER: Fields = {
    **_SPECIAL_TOKENS,
    "model_max_length": NUMBER,
    **dict.fromkeys(
        ("tokenizer_class", "processor_class", "padding_side", "truncation_side", "errors", "name_or_path", "backend",
         "chat_template_type", "tool_parser_type", "transformers_version"), TEXT),
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens",
         "spaces_between_special_tokens", "legacy", "use_default_system_prompt", "is_local"), FLAG),
    "model_input_names": TEXTS,
    "added_tokens_decoder": _object_of(TOKEN, "tokens"),
    "sp_model_kwargs": OBJECT,
    "init_inputs": FieldKind("a list", lambda value: isinstance(value, list)),
}  # fmt: skip
_TOKENIZER_PARTS = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_IMAGES: Fields = {
    **dict.fromkeys(("image_processor_type", "video_processor_type", "processor_class", "image_token"), TEXT),
    **dict.fromkeys(
        ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames", "do_center_crop", "do_pad"),
        FLAG,
    ),
    **dict.fromkeys(
        ("temporal_patch_size", "merge_size", "min_pixels", "max_pixels", "min_frames", "max_frames"),
        SIZE,
    ),
    **dict.fromkeys(("image_mean", "image_std"), NUMBERS),
    **dict.fromkeys(("rescale_factor", "fps"), POSITIVE),
    "resample": COUNT,
    **dict.fromkeys(("patch_size", "size"), _either(SIZE, _object_of(SIZE, "whole numbers above 0"))),
}  # fmt: skip

#: The fields of each file, by its name.
FIELDS: Mapping[str, Fields] = {
    "config.json": _MODEL,
    "generation_config.json": _IDS,
    "tokenizer_config.json": _TOKENIZER,
    "tokenizer.json": {
        **dict.fromkeys(_TOKENIZER_PARTS, OBJECT),
        "added_tokens": _list_of(TOKEN, "tokens"),
        "model": {"type": TEXT},
    },
    "special_tokens_map.json": _SPECIAL_TOKENS,
    "preprocessor_config.json": _IMAGES,
    "video_preprocessor_config.json": _IMAGES,
    "processor_config.json": {**_IMAGES, "image_processor": _IMAGES, "video_processor": _IMAGES},
    "model.safetensors.index.json": {"weight_map": _object_of(TEXT, "texts"), "metadata": OBJECT},
    "adapter_config.json": {
        **dict.fromkeys(("model", "fine_tune_type"), TEXT),
        "chat_template_config": OBJECT,
        "num_layers": WHOLE,
        "lora_parameters": {"rank": SIZE, "scale": NUMBER, "dropout": SHARE, "keys": TEXTS},
        **dict.fromkeys(("min_pixels", "max_pixels", "video_max_frames"), SIZE),
        "fps": POSITIVE,
    },
    "PEFT's adapter_config.json": {
        **dict.fromkeys(("peft_type", "peft_version", "base_model_name_or_path", "bias", "task_type"), TEXT),
        "r": SIZE,
        "lora_alpha": NUMBER,
        "lora_dropout": SHARE,
        **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), FLAG),
        **dict.fromkeys(("target_modules", "exclude_modules"), _either(TEXT, TEXTS)),
        **dict.fromkeys(("modules_to_save", "target_parameters"), TEXTS),
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), _object_of(NUMBER, "numbers")),
        "trainable_token_indices": _either(_COUNTS, _object_of(_COUNTS, "lists of them")),
    },
}  # fmt: skip
