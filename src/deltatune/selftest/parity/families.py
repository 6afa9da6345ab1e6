"""The model families: how each tiny checkpoint is made, as transformers saves it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import seeded
from .seeded import VOCAB

Weights = dict[str, np.ndarray]
Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A model family with a tiny checkpoint that is drawn from a seed, by the options of its transformers config.

    Pairs in `rename` turn a transformers module path into mlx-lm's by regular expression. With `centred_norms` a norm's
    weight is stored as its difference from 1. `draw` chooses a seeded checkpoint for well-conditioned training, in
    which no token has two experts with almost equal scores.
    """

    model_type: str
    options: Config
    rename: tuple[tuple[str, str], ...] = ()
    centred_norms: bool = False
    embedding_deviation: float = 0.5
    learning_rate: float = 4e-3
    not_adapted: tuple[str, ...] = ("lm_head", "kv_b_proj")
    draw: int = 0

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
        """Draw the checkpoint, with transformers' names."""
        stream = f"{self.model_type} {self.draw}"
        return {
            name: seeded.weight(stream, name, tuple(shape), self.embedding_deviation, self.centred_norms)
            for name, shape in shapes.items()
        }

    def mlx_path(self, module: str) -> str:
        """mlx-lm's path of a transformers module."""
        for pattern, replacement in self.rename:
            module = re.sub(pattern, replacement, module)
        return module


_BASE = {"vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {**_BASE, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 512}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# A delta layer follows another layer with adapters, so that the gradient of its input is tested.
ENCLOSED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_STACKED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
EXPERTS = {
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 16,
    "moe_intermediate_size": 28,
    "num_experts_per_tok": 2,
}
_LANGUAGE_MODEL = ((r"^", "language_model."),)
_FORGET_GATE = ((r"\.forget_gate\.", "."),)
_MOE_COMMON = {key: value for key, value in COMMON.items() if key != "intermediate_size"}

FAMILIES: dict[str, Family] = {
    "qwen3_5": Family(
        "qwen3_5_text",
        {**COMMON, **ATTENTION, **DELTA, **_STACKED},
        rename=_LANGUAGE_MODEL,
        centred_norms=True,
        draw=15,
    ),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text",
        {**_MOE_COMMON, **ATTENTION, **DELTA, **ENCLOSED, **EXPERTS},
        rename=_LANGUAGE_MODEL,
        centred_norms=True,
        draw=3,
    ),
    "qwen3_next": Family(
        "qwen3_next", {**COMMON, **ATTENTION, **DELTA, **ENCLOSED, **EXPERTS}, centred_norms=True, draw=6
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **COMMON,
            **_LATENT,
            "num_hidden_layers": 3,
            "num_local_experts": 6,
            "linear_attn_config": {
                "head_dim": 16,
                "num_heads": 3,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
            },
        },
        rename=_FORGET_GATE,
        draw=18,
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        {
            **COMMON,
            **ENCLOSED,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 28,
        },
        draw=2,
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {
            **COMMON,
            **_LATENT,
            "num_hidden_layers": 3,
            "layer_group_size": 3,
            "head_dim": 16,
            "num_local_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
        rename=(*_FORGET_GATE, (r"\.self_attn\.", ".attention."), (r"(layers\.2\.attention)\.o_proj$", r"\1.dense")),
        draw=37,
    ),
    # Layers of Mamba-2, an MLP, attention and experts.
    "nemotron_h": Family(
        "nemotron_h",
        {
            **COMMON,
            **ATTENTION,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "ssm_state_size": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "n_routed_experts": 6,
            "moe_intermediate_size": 28,
            "moe_shared_expert_intermediate_size": 36,
            "num_experts_per_tok": 2,
            "chunk_size": 32,
        },
        rename=((r"^model\.", "backbone."),),
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            **COMMON,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 4,
            "mamba_d_state": 24,
            "mamba_d_head": 24,
            "mamba_chunk_size": 32,
            "num_local_experts": 6,
            "shared_intermediate_size": 36,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
        },
    ),
    # Each layer has Mamba-2 beside attention. mlx-lm folds the multipliers of embedding and head into their matrices.
    "falcon_h1": Family(
        "falcon_h1",
        {
            **COMMON,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": 32,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 1.5,
        },
    ),
    "mamba2": Family(
        "mamba2",
        {
            **_BASE,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 24,
            "state_size": 24,
            # With more, mlx-lm's norm is not that of transformers (models/known_faults.py).
            "n_groups": 1,
            "chunk_size": 32,
        },
    ),
    # Lightning attention in two layers; transformers has no model of it, tests/oracle/parity has one in torch.
    "bailing_moe_linear": Family(
        "bailing_moe_linear",
        {
            **COMMON,
            "hidden_act": "silu",
            "mlp_bias": False,
            "num_hidden_layers": 3,
            "layer_group_size": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "group_norm_size": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 28,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
        },
        draw=5,
    ),
    "qwen3": Family("qwen3", {**COMMON, **ATTENTION, "num_hidden_layers": 2, "tie_word_embeddings": False}),
    # mlx-lm rounds gemma's embedding scale sqrt(hidden_size) to bf16, which is exact for 64.
    "gemma3": Family(
        "gemma3_text",
        {
            **COMMON,
            **ATTENTION,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        centred_norms=True,
        embedding_deviation=0.125,
    ),
}
