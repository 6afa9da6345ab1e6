"""What each model type of mlx-lm needs in its configuration beside the sizes of sizes.py."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tiny_sizes import LAYERS, fields_of

_GRANITE = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
_MINICPM = {"scale_depth": 1.4, "scale_emb": 2}
_WINDOWS = {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]}
_KIMI_DELTA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 2,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_SOME_ATTENTION = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_bias": False}
_BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.3125}}
_ROPE = {
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4096,
    }
}

_ROPE_OF_KINDS = {"rope_parameters": {kind: {"rope_theta": 10000.0} for kind in set(_WINDOWS["layer_types"])}}

# Fields that replace or complete those of sizes.py.
OWN: dict[str, dict[str, Any]] = {
    "Klear": {"num_key_value_heads": 4},
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": _WINDOWS,
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "bailing_hybrid": {"group_norm_size": 4, "num_key_value_heads": 4},
    "bailing_moe_linear": {"group_norm_size": 1, "num_key_value_heads": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "topk_method": "gready",
    },
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLGL"},
    "exaone_moe": _WINDOWS | {"is_moe_layer": [False, True, True, True]},
    "gear": _WINDOWS,
    "gemma3_text": {"sliding_window_pattern": 2},
    # E2B and E4B share the keys and values of the last layers.
    "gemma4_text": {"num_kv_shared_layers": 2, "sliding_window_pattern": 2},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5] * LAYERS,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "altup_num_inputs": 4,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "glm4_moe": {"use_qk_norm": True},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE | {"layer_types": ["mamba", "attention"] * 2, "mamba_proj_bias": False},
    "hunyuan": {
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "linear_attn_config": _KIMI_DELTA | {"gate_lower_bound": -5.0},
        "hidden_act": "situ",
        "activation_situ_beta": 1.5,
        "attn_res_block_size": 2,
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
    },
    "kimi_linear": {"linear_attn_config": _KIMI_DELTA},
    "lfm2": _SOME_ATTENTION
    | {"block_multiple_of": 4, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
    "lfm2_moe": _SOME_ATTENTION | {"use_expert_bias": True},
    "llama4": {
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": True,
        "rope_scaling": None,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"no_rope_layers": [0, 0, 1, 1], "use_qk_norm": True},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": {"use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    "mamba2": {
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "num_heads": 8,
    },
    "mellum": _WINDOWS | _ROPE_OF_KINDS,
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm": _MINICPM,
    "minicpm3": _MINICPM | {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": 1.0}},
    "minimax_m3_vl": {"dense_intermediate_size": 96, "moe_layer_freq": [0, 0, 1, 1]},
    "ministral3": _ROPE,
    "mistral4": _ROPE,
    "muse_glimmer": _WINDOWS,
    "muse_spark": _WINDOWS
    | {
        "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0],
        "final_logit_softcapping": 30.0,
        "output_multiplier": 0.5,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [_BLOCK] * LAYERS},
    # Every released one has layers without a mixer, which have no cache.
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "-", "*", "E"],
        "mamba_proj_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.5] * LAYERS,
    },
    # It writes to the logits of fixed token ids, up to this vocabulary's last.
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "vocab_size": 100352},
    "plamo": {"n_shared_head": 2, "num_key_value_heads": 2},
    "prism_hadamard_qwen35": {"hidden_size": 512, "intermediate_size": 512, "linear_key_head_dim": 128},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "solar_open": {"use_qk_norm": True},
    "spark2_5": _ROPE_OF_KINDS,
    "stablelm": {"use_qkv_bias": False},
}
# What stands beside the text part of a type.
_BESIDE: dict[str, dict[str, Any]] = {
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "block": block, "embedding": path == "model.embed_tokens", "dtype": "float16"}
            for path, block in (
                ("model.embed_tokens", 512),
                ("model.layers.0.linear_attn.in_proj_qkv", 512),
                ("model.layers.2.mlp.down_proj", 0),
                ("lm_head", 512),
            )
        ],
    },
}
# Types whose text part has a configuration of its own, and the class that reads it.
NESTED: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}


def types() -> list[str]:
    """Return the name of every module of mlx-lm that holds a model and can be imported."""
    models, found = importlib.import_module("mlx_lm.models"), []
    for module in pkgutil.iter_modules(models.__path__):
        try:
            members = vars(importlib.import_module(f"mlx_lm.models.{module.name}"))
        # olmo ends the process where a package of its own is not installed.
        except (ImportError, SystemExit):
            continue
        if "Model" in members and "ModelArgs" in members:
            found.append(module.name)
    return found


def config_of(kind: str) -> dict[str, Any]:
    """Return the config.json of a tiny model of a type of mlx-lm."""
    if kind not in NESTED:
        return {"model_type": kind} | fields_of(f"mlx_lm.models.{kind}") | OWN.get(kind, {})
    module, name = NESTED[kind]
    own = OWN.get(module, {}) | OWN.get(kind, {})
    text = {"model_type": module} | fields_of(f"mlx_lm.models.{module}", name) | own
    if module == "qwen3_5" and kind != "qwen3_5_moe":
        text["num_experts"] = 0
    beside = fields_of(f"mlx_lm.models.{kind}") | _BESIDE.get(kind, {})
    return {"model_type": kind} | beside | {"text_config": text}
