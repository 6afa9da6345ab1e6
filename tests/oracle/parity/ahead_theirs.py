"""The reference run of the multi-token-prediction head: transformers' own layers put together, in fp32 on the CPU."""

from collections.abc import Callable

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.families import Config, Weights

from . import ahead, theirs
from .ahead import CASES, AheadCase
from .record import Comparison, Reference

# The layers and norms of which the head of each model type is made.
_LAYERS = {
    "qwen3_5_text": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    "qwen3_next": (Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
}


class Head(torch.nn.Module):
    """The head of Qwen3.5 or Qwen3-Next, which transformers has no class for and leaves out of a checkpoint."""

    def __init__(self, config):
        super().__init__()
        layer, norm = _LAYERS[config.model_type]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        self.layers = torch.nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])
        self.norm = norm(width, eps=eps)

    def forward(self, hidden, embedded, model):
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        positions = torch.arange(x.shape[1]).view(1, 1, -1).expand(3, x.shape[0], -1)
        if isinstance(self.layers[0], Qwen3NextDecoderLayer):
            positions = positions[0]
        x = self.layers[0](x, position_embeddings=model.rotary_emb(x, positions), attention_mask=_causal(x))
        return self.norm(x)


class NemotronHead(torch.nn.Module):
    """The head of Nemotron-H, of an attention layer and one of experts."""

    def __init__(self, config):
        super().__init__()
        width, eps, kinds = config.hidden_size, config.layer_norm_epsilon, config.layers_block_type
        self.layers = torch.nn.ModuleList([NemotronHBlock(config, kinds.index(k)) for k in ("full_attention", "moe")])
        self.layers[0].enorm = NemotronHRMSNorm(width, eps=eps)
        self.layers[0].hnorm = NemotronHRMSNorm(width, eps=eps)
        self.layers[0].eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layers[1].final_layernorm = NemotronHRMSNorm(width, eps=eps)

    def forward(self, hidden, embedded, _model):
        first, last = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1))
        return last.final_layernorm(last(first(x, attention_mask=_causal(x))))


class GlmHead(torch.nn.Module):
    """The head of GLM-5, a layer of experts."""

    def __init__(self, config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = GlmMoeDsaRMSNorm(width, eps=eps)
        self.hnorm = GlmMoeDsaRMSNorm(width, eps=eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        for name, module in GlmMoeDsaDecoderLayer(config, config.mlp_layer_types.index("sparse")).named_children():
            self.add_module(name, module)
        self.shared_head = torch.nn.ModuleDict({"norm": GlmMoeDsaRMSNorm(width, eps=eps)})

    def forward(self, hidden, embedded, model):
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        rope = model.rotary_emb(x, torch.arange(x.shape[1])[None])
        mask = _causal(x).expand(len(x), -1, -1, -1)
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=rope, attention_mask=mask)[0]
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


def _head(config) -> torch.nn.Module:
    kinds = {"nemotron_h": NemotronHead, "glm_moe_dsa": GlmHead}
    return kinds.get(config.model_type, Head)(config)


def _prefix(config: Config) -> str:
    """Where the tensors of a head stand in a released checkpoint."""
    return f"model.layers.{config['num_hidden_layers']}." if config["model_type"] == "glm_moe_dsa" else "mtp."


def _causal(x: torch.Tensor) -> torch.Tensor:
    """The mask [1, 1, T, T] that is added to the scores of rows x [B, T, D]."""
    length = x.shape[1]
    return torch.full((1, 1, length, length), torch.finfo(x.dtype).min).triu(1)


def _stored(head: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return a head's tensors as released checkpoints have them, a matrix for each expert."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        block, of_experts, leaf = name.rpartition("experts.")
        if of_experts and tensor.ndim == 3:
            parts = {leaf: tensor}
            if leaf == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
            for number in range(len(tensor)):
                stored |= {f"{prefix}{block}experts.{number}.{part}.weight": parts[part][number] for part in parts}
        else:
            stored[f"{prefix}{name}"] = tensor
    return stored


class AheadComparison(Comparison):
    """The head, beside its model or alone."""

    folder, cases, ours = "ahead/", CASES, staticmethod(ahead.run)

    def layout(self, case: AheadCase) -> tuple[Config, dict[str, tuple[int, ...]]]:
        config, shapes = super().layout(case)
        options = transformers.AutoConfig.for_model(config["model_type"], **self.family(case).options)
        of_head = _stored(_head(options), _prefix(config))
        depth = "mtp_num_hidden_layers" if case.family.startswith("qwen") else "num_nextn_predict_layers"
        return {**config, depth: 1}, shapes | {name: tuple(tensor.shape) for name, tensor in of_head.items()}

    def load(self, config: Config, weights: Weights) -> torch.nn.Module:
        prefix = _prefix(config)
        model = theirs.load(config, {name: value for name, value in weights.items() if not name.startswith(prefix)})
        model.mtp = _head(model.config)
        with torch.no_grad():
            # Parts of a tensor are views of it, which are written into.
            for name, tensor in _stored(model.mtp, prefix).items():
                tensor.copy_(torch.from_numpy(weights[name]))
        return model

    def targets(self, case: AheadCase, model: torch.nn.Module) -> dict[str, tuple[int, int]]:
        every = super().targets(case, model)
        return {path: sizes for path, sizes in every.items() if case.mtp is True or path.startswith("mtp.")}

    def loss(self, case: AheadCase, model: torch.nn.Module, start: Reference) -> Callable[[int], torch.Tensor]:
        def loss_of(step: int) -> torch.Tensor:
            rows = seeded.batch(step)
            tokens, counts = torch.from_numpy(rows.tokens).long(), torch.from_numpy(rows.counts)
            hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            read = hidden if case.trunk_gradient else hidden.detach()
            drafted = model.mtp(read, model.get_input_embeddings()(tokens[:, 1:]), model.model)
            # The last position has no token after the next one.
            of_head = _losses(model.lm_head(drafted[:, :-1]), tokens[:, 2:], counts[:, 1:])
            if case.mtp == "only":
                return of_head / counts[:, 1:].sum()
            of_model = _losses(model.lm_head(hidden), tokens[:, 1:], counts)
            return (of_model + case.weight * of_head) / counts.sum()

        return loss_of


def _losses(logits: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * counts.flatten()).sum()


COMPARISON = AheadComparison()
