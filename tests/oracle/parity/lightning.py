"""A model of Lightning attention in torch, with bailing_moe_linear's names, which transformers lacks."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb


class BailingConfig(transformers.PreTrainedConfig):
    """The options of the family, as its config.json has them."""

    model_type = "bailing_moe_linear"


class _Attention(nn.Module):
    """Softmax attention in the last layer of a group; else S = exp(slope) S + v k^T, y = S q, as one sum over pairs."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.linear = (layer + 1) % config.layer_group_size > 0
        self.heads = config.num_attention_heads
        self.keys = self.heads if self.linear else config.num_key_value_heads
        self.size = config.hidden_size // self.heads
        self.config = config
        self.query_key_value = nn.Linear(config.hidden_size, (self.heads + 2 * self.keys) * self.size, bias=False)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.query_layernorm = nn.RMSNorm(self.size, config.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(self.size, config.rms_norm_eps)
        # Slopes of ALiBi for a power of two heads, smaller in later layers.
        self.factor = 1 - max(0, layer - 1) / (config.num_hidden_layers - 1) + 1e-5
        if self.linear:
            self.g_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.g_norm = nn.RMSNorm(config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.keys, self.keys], 1)
        places = torch.arange(x.shape[1], dtype=torch.float32)
        angles = places[:, None] * self.config.rope_theta ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.cat([angles, angles], -1)[None]
        q, k = apply_rotary_pos_emb(self.query_layernorm(q), self.key_layernorm(k), angles.cos(), angles.sin())
        if not self.linear:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.dense(y.transpose(1, 2).flatten(2))
        slopes = 2.0 ** (-8 * torch.arange(1, self.heads + 1) / self.heads) * self.factor
        distances = places[:, None] - places
        decay = (-slopes[:, None, None] * distances.clamp(min=0)).exp() * (distances >= 0)
        y = (q @ k.transpose(2, 3) * self.size**-0.5 * decay @ v).transpose(1, 2).flatten(2)
        grouped = y.unflatten(-1, (self.config.group_norm_size, -1))
        y = nn.functional.rms_norm(grouped, grouped.shape[-1:], eps=self.config.rms_norm_eps).flatten(-2)
        return self.dense(self.g_norm.weight * y * self.g_proj(x).sigmoid())


class _Layer(nn.Module):
    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.attention = _Attention(config, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Backbone(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class BailingForCausalLM(transformers.PreTrainedModel):
    """The model: dense layers, padding on the right alone."""

    config_class = BailingConfig
    _supports_sdpa = True

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = _Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


transformers.AutoConfig.register(BailingConfig.model_type, BailingConfig)
transformers.AutoModelForCausalLM.register(BailingConfig, BailingForCausalLM)
