"""The families whose tiny checkpoints transformers writes and mlx-lm loads, one table for every live comparison.

A case is a family, or a family and a word on what is set beside its small sizes (tiny_sizes.py): windows and chunks of
16 tokens, and original lengths of 16, which the rows of the comparisons exceed.
"""

from __future__ import annotations

from typing import Any

ORIGINAL = 16
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
_DELTA = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
# mlx-lm's models of these families have no window (models/known_faults.py).
_NO_WINDOW: dict[str, Any] = {"sliding_window": None}


def _by_kind(full: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": _SLIDING, "rope_parameters": {"sliding_attention": _PLAIN, "full_attention": full}}


SAVED: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "apertus llama3": {"rope_parameters": _LLAMA3},
    "bailing_hybrid": _DELTA | {"head_dim": 8},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2 yarn": {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3": {},
    "deepseek_v3 yarn": {"rope_parameters": _YARN},
    "deepseek_v32": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_k": 4},
    "exaone4": {},
    "exaone_moe": {},
    "falcon_h1": {},
    "gemma2": {"layer_types": ["full_attention"] * 4},
    "gemma3": {},
    "gemma3_text": {"layer_types": _SLIDING},
    "gemma3_text linear": _by_kind(_LINEAR),
    "gemma4": {},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "glm": {"rope_parameters": _PLAIN | {"partial_rotary_factor": 1.0}},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt_bigcode": {"n_inner": 256, "activation_function": "gelu"},
    "gpt_neox": {"attention_bias": True, "intermediate_size": 256, "hidden_act": "gelu_fast"},
    "gpt_oss": {"attention_bias": True},
    "gpt_oss yarn": {"rope_parameters": _YARN | {"truncate": False}},
    "gptj": {"rotary_dim": 8, "intermediate_size": 256, "n_inner": 256},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "internlm3": {},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts_per_tok": 4},
    "laguna": {},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "llama": {},
    "llama linear": {"rope_parameters": _LINEAR},
    "llama llama3": {"rope_parameters": _LLAMA3},
    "llama4": {},
    "mamba": {},
    "mamba2": {"num_heads": 8},
    "mellum": {},
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "ministral3": _NO_WINDOW,
    "ministral3 yarn": _NO_WINDOW
    | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "mistral": _NO_WINDOW,
    "mistral4": {},
    "mixtral": _NO_WINDOW,
    "nemotron": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
    "olmo2": {},
    "olmo3": {},
    "olmo3 yarn": _by_kind(_YARN),
    "olmo_hybrid": _DELTA,
    "olmoe": {},
    "phi": {},
    "phi3": _NO_WINDOW,
    "phi3 longrope": _NO_WINDOW | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "sliding_window": None},
    "qwen2": {},
    "qwen2 yarn": {"rope_parameters": _YARN},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3": {},
    "qwen3 yarn": {"rope_parameters": _YARN},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_vl": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": _NO_WINDOW | {"hidden_act": "gelu"},
}
# Families of the gated delta rule.
WITH_STATES = {"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
# Cases whose documents may not share a row, for their states, tables of positions, chunks or scales by position.
UNPACKED = {
    "gpt_bigcode",
    "hunyuan_v1_dense",
    "jamba",
    "llama4",
    "mamba",
    "minimax_m3_vl",
    "ministral3 yarn",
}
# Families of which mlx-lm's model takes other keys, names or shapes than transformers writes.
REFUSED: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {},
    "gpt2": {},
    "kimi_k25": {},
    "kimi_linear": _DELTA,
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"head_dim": 8},
    "mimo_v2_flash": {},
    "minicpm3": {},
    "minimax": {},
    "minimax_m3_vl_text": {
        "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5},
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "dense_intermediate_size": 96,
        "index_block_size": 16,
        "index_topk_blocks": 1,
    },
    "mistral3": {},
    "muse_glimmer": {},
    "nanochat": {},
    "qwen3_vl_moe": {},
    "recurrent_gemma": {},
    "solar_open": {},
}
