"""The numbers of the config.json files of models that many people tune, as public repositories hold them.

Only what decides the memory of a training step is here: sizes, layers, experts, and whether the head is a matrix of its
own. Vision towers and layers for multi-token prediction, which training on text does not load, are left out.

Source of Qwen3.5-2B, which had been written from memory: scripts/models/qwen3.5-2B.sh of williammtan/miles at ff3c17c
and of K1XE/BPM at 55093cf, made for Megatron from its config.json; of Kimi-Linear: the config.json of
Firworks/Kimi-Linear-48B-A3B-Instruct-nvfp4, a quantised copy on the hub. Both equal what stands here. Nemotron-3-Nano:
Megatron-Bridge's provider of the model and its tests. Granite-4.0-H-Tiny: the table of its model card.
"""

from __future__ import annotations

from typing import Any


def _qwen3_5(hidden: int, mlp: int, layers: int, heads: tuple[int, int], values: int, tied: bool) -> dict[str, Any]:
    """A dense Qwen3.5: heads are those of attention and its keys, values the value heads of the delta layers."""
    return _hybrid("qwen3_5", hidden, mlp, layers, heads, values, 248320, tied)


def _hybrid(
    kind: str, hidden: int, mlp: int, layers: int, heads: tuple[int, int], values: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    rope = {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "rope_parameters": {"type": "default", "rope_type": "default", "mrope_section": [11, 11, 10], **rope},
        **rope,
    }


def _experts(count: int, chosen: int, size: int) -> dict[str, Any]:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": count, "num_experts_per_tok": chosen, **sizes}


_QWEN3_NEXT = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_FULL_ATTENTION = [4, 8, 12, 16, 20, 24, 27]
_KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "head_dim": 72,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "model_max_length": 1048576,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": _FULL_ATTENTION,
        "kda_layers": [layer for layer in range(1, 28) if layer not in _FULL_ATTENTION],
    },
}

_NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": list("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_proj_bias": False,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "time_step_limit": [0.0, 1e9],
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144,
}
_GRANITE_4_TINY = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "position_embedding_type": "nope",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _qwen3_5(1024, 3584, 24, (8, 2), 16, tied=True),
    "Qwen3.5-2B": _qwen3_5(2048, 6144, 24, (8, 2), 16, tied=True),
    "Qwen3.5-4B": _qwen3_5(2560, 9216, 32, (16, 4), 32, tied=True),
    "Qwen3.5-9B": _qwen3_5(4096, 12288, 32, (16, 4), 32, tied=False),
    "Qwen3.5-27B": _qwen3_5(5120, 17408, 64, (24, 4), 48, tied=False),
    "Qwen3.5-35B-A3B": _hybrid("qwen3_5_moe", 2048, 5632, 40, (16, 2), 32, 248320, False) | _experts(256, 8, 512),
    "Kimi-Linear-48B-A3B": _KIMI_LINEAR,
    "Nemotron-3-Nano-30B-A3B": _NEMOTRON_3_NANO,
    "Granite-4.0-H-Tiny": _GRANITE_4_TINY,
    "Qwen3-Next-80B-A3B": _hybrid("qwen3_next", 2048, 5632, 48, (16, 2), 32, 151936, False)
    | _experts(512, 10, 512)
    | _QWEN3_NEXT,
}
