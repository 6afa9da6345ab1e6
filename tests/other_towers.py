"""Tiny configurations of mlx-vlm's models that are not trained on images here: config.json as mlx-vlm reads it."""

from __future__ import annotations

import importlib
from typing import Any

from families import COMMON

_TEXT = {key: value for key, value in COMMON.items() if not key.endswith("token_id")}
_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_DELTA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
}
_KIMI_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_MOONVIT = {
    "model_type": "moonvit",
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "intermediate_size": 64,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}
_DEEPSEEK = {"model_type": "deepseek_v3", **_TEXT, **_LATENT, **_EXPERTS, "rope_theta": 10000.0}
_KIMI_VL = {"text_config": _DEEPSEEK, "vision_config": _MOONVIT, "media_placeholder_token_id": 5, "vocab_size": 320}

CONFIGS: dict[str, dict[str, Any]] = {
    "glm5_next": {
        "model_type": "glm5_next",
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            **_LATENT,
            "qk_rope_head_dim": 0,
            "index_topk": 4,
            "index_kpool": 2,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "num_nextn_predict_layers": 0,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "projection_intermediate_size": 64,
        },
        "image_token_id": 5,
        "image_start_token_id": 3,
        "image_end_token_id": 4,
        "video_start_token_id": 6,
        "video_end_token_id": 7,
    },
    "kimi_vl": {"model_type": "kimi_vl"} | _KIMI_VL,
    "kimi_k25": {"model_type": "kimi_k25"} | _KIMI_VL,
    "kimi_k3": {
        "model_type": "kimi_k3",
        "text_config": {
            **_TEXT,
            **_LATENT,
            **_KIMI_EXPERTS,
            "linear_attn_config": _DELTA,
            "activation_situ_beta": 1.5,
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
        },
        "vision_config": {
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 2,
            "vt_hidden_size": 64,
            "vt_intermediate_size": 64,
            "qkv_hidden_size": 64,
            "mm_hidden_size": 64,
            "text_hidden_size": 64,
        },
        "media_placeholder_token_id": 5,
    },
}


def build(family: str) -> Any:
    """mlx-vlm's model of a configuration, as its own loader builds it."""
    module = importlib.import_module(f"mlx_vlm.models.{family}")
    config = module.ModelConfig.from_dict(CONFIGS[family])
    for part, kind in (("text_config", "TextConfig"), ("vision_config", "VisionConfig")):
        if isinstance(getattr(config, part, None), dict):
            setattr(config, part, getattr(module, kind).from_dict(getattr(config, part)))
    return module.Model(config)
