"""The families that deltatune trains, as config.json of tiny models has them, and noise for their random weights."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCABULARY = 320

_QWEN_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN3_5 = (
    COMMON
    | _QWEN_DELTA
    | {
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 100000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
    }
)
_KIMI_LINEAR_ATTENTION = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 2,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_LATENT_ATTENTION = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_KIMI_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.5,
    "num_expert_group": 1,
    "topk_group": 1,
}

# Families whose text options stand under `text_config`, as in their released checkpoints.
NESTED = {"qwen3_5", "qwen3_5_moe", "kimi_k3"}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5"} | _QWEN3_5,
    "qwen3_5_moe": {"model_type": "qwen3_5_moe"} | _QWEN3_5 | _QWEN_EXPERTS,
    "qwen3_next": COMMON
    | _QWEN_DELTA
    | _QWEN_EXPERTS
    | {
        "model_type": "qwen3_next",
        "head_dim": 32,
        "mlp_only_layers": [],
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
    },
    "kimi_linear": COMMON
    | _LATENT_ATTENTION
    | _KIMI_EXPERTS
    | {
        "model_type": "kimi_linear",
        "head_dim": 24,
        "rope_theta": 10000.0,
        "linear_attn_config": _KIMI_LINEAR_ATTENTION,
        "model_max_length": 2048,
        "mla_use_nope": True,
    },
    "olmo_hybrid": COMMON
    | {
        "model_type": "olmo_hybrid",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "rope_theta": 10000.0,
    },
    "bailing": COMMON
    | _LATENT_ATTENTION
    | {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "layer_group_size": 4,
        "head_dim": 16,
        "q_lora_rank": 32,
    },
    "kimi_k3": COMMON
    | _LATENT_ATTENTION
    | _KIMI_EXPERTS
    | {
        "model_type": "kimi_k3",
        "hidden_act": "situ",
        "linear_attn_config": _KIMI_LINEAR_ATTENTION | {"gate_lower_bound": -5.0},
        "activation_situ_beta": 1.5,
        "attn_res_block_size": 2,
        "q_lora_rank": 32,
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
    },
    "qwen3": COMMON | {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 1, "rope_theta": 10000.0},
    "gemma3_text": {key: value for key, value in COMMON.items() if key != "tie_word_embeddings"}
    | {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
}


def with_noise(model: nn.Module) -> nn.Module:
    """Add noise to the tensors of `model` that start constant (norms, biases, gates), so that no gradient hides."""

    def vary(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or (array.size > 1 and (array.max() != array.min()).item()):
            return array
        return array + 0.1 * mx.random.normal(array.shape).astype(array.dtype)

    model.update(tree_map(vary, model.parameters()))
    mx.eval(model.parameters())
    return model
