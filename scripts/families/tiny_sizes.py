"""Small sizes for the fields of a model's configuration, by name, and the configurations that are made of them.

Models name their sizes much alike, so that one table serves most of them: only the fields that a model's own class of
arguments declares are set. types.py has what a model needs beside that.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any

VOCABULARY = 320
LAYERS = 4
HIDDEN, HEADS, HEAD_SIZE = 64, 4, 16

_COUNTS = {
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_transformer_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "num_attention_groups": 2,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    "num_swa_attention_heads": HEADS,
    "num_swa_key_value_heads": 2,
}
_WIDTHS = {
    "hidden_size": HIDDEN,
    "hidden_dim": HIDDEN,
    "d_model": HIDDEN,
    "n_embd": HIDDEN,
    "model_dim": HIDDEN,
    "block_dim": HIDDEN,
    "intermediate_size": 96,
    "ff_intermediate_size": 96,
    "ffn_hidden_size": 96,
    "intermediate_size_mlp": 96,
    "block_ff_dim": 96,
    "n_inner": 96,
    "head_dim": HEAD_SIZE,
    "swa_head_dim": HEAD_SIZE,
    "swa_v_head_dim": HEAD_SIZE,
    "global_head_dim": HEAD_SIZE,
    "hidden_size_per_head": HEAD_SIZE,
    "kv_channels": HEAD_SIZE,
    "mamba_head_dim": HEAD_SIZE,
    "mamba_d_head": HEAD_SIZE,
    "mamba_d_ssm": HIDDEN,
    "linear_key_head_dim": HEAD_SIZE,
    "linear_value_head_dim": HEAD_SIZE,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "rotary_dim": 8,
    "vocab_size": VOCABULARY,
    "num_vocab": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "dim_model_base": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32,
    "share_expert_dim": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "router_jitter_noise": 0.0,
}
_REST = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
    "n_positions": 1024,
    "n_ctx": 1024,
    "block_size": 1024,
    "model_max_length": 4096,
    "original_max_position_embeddings": 4096,
    # Short enough that a row of the matrix is longer than a window.
    "sliding_window": 16,
    "sliding_window_size": 16,
    "attention_window_size": 16,
    "window_size": 16,
    "loop_window_size": 16,
    "index_topk": 2048,
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "conv_L_cache": 3,
    "conv_kernel": 4,
    "conv_window": 2,
    "conv1d_width": 4,
    "linear_conv_kernel_dim": 4,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "layer_group_size": 4,
    "full_attention_interval": 4,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
SIZES: dict[str, Any] = _COUNTS | _WIDTHS | _EXPERTS | _REST


def fields_of(module: str, name: str = "ModelArgs") -> dict[str, Any]:
    """Return the small sizes of the fields that the class `name` of a model's module declares."""
    arguments = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(arguments)
    chosen = {}
    for field in dataclasses.fields(arguments):
        if field.name not in SIZES:
            continue
        value = SIZES[field.name]
        # None is the value of a field only where the model says so.
        if value is not None or type(None) in typing.get_args(hints[field.name]):
            chosen[field.name] = value
    return chosen
