"""Tiny models of families that deltatune must not take for gated-delta ones."""

from typing import Any

import mlx.nn as nn
import pytest

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1}

OTHERS: dict[str, dict[str, Any]] = {
    "mamba": {
        "num_hidden_layers": 2,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "nemotron_h": {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-"],
        "time_step_limit": [0.0, 100.0],
    },
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 32, "mamba_chunk_size": 16} | _MAMBA_2,
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "attention_bias": False,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.5,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    }
    | _MAMBA_2,
    "plamo2": {
        "num_hidden_layers": 2,
        "hidden_size_per_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "full_attention_idx": [1],
    },
    "gemma2": {"num_hidden_layers": 2},
    "cohere": {"num_hidden_layers": 2},
    "minicpm": {
        "num_hidden_layers": 2,
        "dim_model_base": 8,
        "scale_emb": 2,
        "scale_depth": 1.4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "rwkv7": {
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rope_theta": 10000.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "hunyuan_v1_dense": {
        "num_hidden_layers": 2,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "gpt2": {
        "n_ctx": 64,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
        "num_hidden_layers": 2,
    },
}


@pytest.fixture(scope="session")
def other_model():
    """other_model(family, **options) -> a fresh tiny model, of OTHERS or with these options."""

    def factory(family: str, **options: Any) -> nn.Module:
        from mlx_lm.utils import _get_classes

        config = {"model_type": family} | _COMMON | OTHERS.get(family, {}) | options
        model_class, arguments_class = _get_classes(config)
        return model_class(arguments_class.from_dict(config))

    return factory
