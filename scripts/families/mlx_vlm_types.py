"""What each model type of mlx-vlm needs in its configuration beside the sizes of sizes.py."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from typing import Any

import mlx_vlm.models
from configurations import OWN
from tiny_sizes import HIDDEN, fields_of

PREFIX = "mlx_vlm."
# A tower of two layers, by the names that towers give their sizes.
_TOWER = {
    "depth": 2,
    "num_hidden_layers": 2,
    "vt_num_hidden_layers": 2,
    "layers": 2,
    "hidden_size": HIDDEN,
    "vt_hidden_size": HIDDEN,
    "mm_hidden_size": HIDDEN,
    "qkv_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN,
    "embed_dim": HIDDEN,
    "width": HIDDEN,
    "out_hidden_size": HIDDEN,
    "projection_dim": HIDDEN,
    "projection_intermediate_size": HIDDEN,
    "intermediate_size": 96,
    "vt_intermediate_size": 96,
    "num_heads": 4,
    "heads": 4,
    "num_attention_heads": 4,
    "vt_num_attention_heads": 4,
    "num_key_value_heads": 4,
    "patch_size": 8,
    "spatial_patch_size": 8,
    "image_size": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "in_channels": 3,
    "num_channels": 3,
    "deepstack_visual_indexes": [],
}
_SIGLIP = {"model_type": "siglip_vision_model"}
_TOWERS: dict[str, dict[str, Any]] = {
    "aya_vision": _SIGLIP,
    "gemma3": _SIGLIP | {"image_size": 128},
    "internvl_chat": _SIGLIP,
    "llava": _SIGLIP,
    "llava_bunny": _SIGLIP,
    "llava_next": {"model_type": "clip_vision_model"},
    "llama4": {
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "pixel_shuffle_ratio": 0.5,
        "projector_dropout": 0.0,
        "projector_input_dim": HIDDEN,
        "projector_output_dim": HIDDEN,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": HIDDEN,
    },
    "mage_vl": {"num_heads": 2, "hidden_size": 128, "num_attention_heads": 2},
    "qwen3_vl": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0]},
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_TEXTS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16, "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus"},
    "gemma3": {"sliding_window_pattern": 2},
    "gemma4": {"num_kv_shared_layers": 2, "sliding_window_pattern": 2},
    "gemma4_unified": {"num_kv_shared_layers": 2, "sliding_window_pattern": 2},
    "glm4v_moe": {"use_qk_norm": True},
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "num_nextn_predict_layers": 0},
    "lfm2_vl": {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3]},
    "llava": {"model_type": "llama"},
    "llava_bunny": {"num_key_value_heads": 4},
    "llava_next": {"model_type": "llama"},
    "moondream3": {"num_key_value_heads": 4, "rope_dim": 8},
    "nemotron_h_nano_omni": OWN["nemotron_h"],
}
_WHOLE: dict[str, dict[str, Any]] = {
    "deepseek_v4": _TEXTS["deepseek_v4"],
    "gemma3": {"mm_tokens_per_image": 16},
    "gemma4": {"audio_config": None},
    "gemma4_unified": {"audio_config": None},
    "kolibri1": {"layer_types": _WINDOWS},
    "llava_bunny": {"auto_map": {}, "mm_hidden_size": HIDDEN},
    "nemotron_nas": OWN["nemotron-nas"],
    "olmo": {"embedding_size": 320, "mlp_hidden_size": 128, "mlp_ratio": 2},
}
# Language models that are not tried, by the reason.
NOT_TRIED = {
    "they give no logits for a row of text": {
        "diffusion_gemma",
        "embedding_gemma2",
        "florence2",
        "nemotron_parse",
        "rfdetr",
        "rt_detr_v2",
        "sam3d_body",
    },
    "a small configuration of them is not known here": {
        "cohere_compass",
        "deepseek_v41",
        "deepseek_vl_v2",
        "deepseekocr",
        "ernie4_5_moe_vl",
        "fastvlm",
        "gemma3n",
        "hunyuan_vl",
        "idefics2",
        "limite",
        "mimo_v2",
        "molmo",
        "molmo2",
        "molmo_point",
        "multi_modality",
        "muse_spark",
        "paligemma",
        "phi3_v",
        "phi3small",
        "qwen3_omni_moe",
        "unlimited_ocr",
    },
}
# Ids of the tokens that stand for pictures; one beyond the vocabulary would read beyond the embedding.
_TOKENS = {
    "image_token_id": 5,
    "image_token_index": 5,
    "media_placeholder_token_id": 5,
    "video_token_id": 6,
    "video_token_index": 6,
    "audio_token_id": 9,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_start_token_id": 3,
    "image_end_token_id": 4,
    "video_start_token_id": 7,
    "video_end_token_id": 8,
}


def types() -> list[str]:
    """Return the name of every language model of mlx-vlm that can be imported, with the prefix.

    Encoders, detectors and generators of images have no module `language`.
    """
    found, left_out = [], set().union(*NOT_TRIED.values())
    for module in pkgutil.iter_modules(mlx_vlm.models.__path__):
        name = f"mlx_vlm.models.{module.name}"
        if module.name in left_out or not module.ispkg or importlib.util.find_spec(f"{name}.language") is None:
            continue
        try:
            members = vars(importlib.import_module(name))
        except ImportError:
            continue
        if "Model" in members and "ModelConfig" in members:
            found.append(PREFIX + module.name)
    return found


def config_of_vlm(kind: str) -> dict[str, Any]:
    """Return the config.json of a tiny model of a type of mlx-vlm."""
    name = kind.removeprefix(PREFIX)
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    own = OWN.get(name, {})
    parts = {
        "text_config": own | _TEXTS.get(name, {}),
        "vision_config": _TOWERS.get(name, {}),
        "audio_config": {},
    }
    nested, flat = {}, {}
    for part, more in parts.items():
        arguments = getattr(module, part.title().replace("_", ""), None)
        if arguments is None:
            continue
        declared = {field.name: field for field in dataclasses.fields(arguments)}
        if part == "text_config":
            chosen = flat = fields_of(arguments.__module__, arguments.__name__) | more
        else:
            chosen = {field: value for field, value in _TOWER.items() if field in declared} | more
        if "model_type" in declared and declared["model_type"].default is dataclasses.MISSING:
            chosen = {"model_type": name} | chosen
        nested[part] = chosen
    arguments = module.ModelConfig
    whole = fields_of(arguments.__module__, arguments.__name__) | own
    # Some types read the sizes of their language model from the top level.
    return {**flat, **whole, **_TOKENS, "model_type": name, **nested, **_WHOLE.get(name, {})}
