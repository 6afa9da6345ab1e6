"""The reference run of the multi-token-prediction head: transformers' own layers put together, in fp32 on the CPU."""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.families import Config, Family, Weights

from . import ahead, theirs
from .ahead import CASES, AheadCase
from .record import Comparison, Reference


class Head(torch.nn.Module):
    """The head of Qwen3.5, which transformers has no class for and leaves out when it loads a checkpoint."""

    def __init__(self, config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        attention = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)

    def forward(self, hidden, embedded, rotary):
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        length = x.shape[1]
        mask = torch.full((1, 1, length, length), torch.finfo(x.dtype).min).triu(1)
        positions = torch.arange(length).view(1, 1, -1).expand(3, x.shape[0], -1)
        x = self.layers[0](x, position_embeddings=rotary(x, positions), attention_mask=mask)
        return self.norm(x)


class AheadComparison(Comparison):
    """The head, beside its model or alone."""

    folder, cases, ours = "ahead/", CASES, staticmethod(ahead.run)

    def family(self, case: AheadCase) -> Family:
        return case.model.family

    def layout(self, case: AheadCase) -> tuple[Config, dict[str, tuple[int, ...]]]:
        config, shapes = super().layout(case)
        return {**config, "mtp_num_hidden_layers": 1}, shapes | ahead.shapes(config)

    def load(self, config: Config, weights: Weights) -> torch.nn.Module:
        model = theirs.load(config, {name: value for name, value in weights.items() if not name.startswith("mtp.")})
        model.mtp = Head(model.config)
        of_head = {name: torch.from_numpy(value) for name, value in weights.items() if name.startswith("mtp.")}
        model.mtp.load_state_dict({name.removeprefix("mtp."): value for name, value in of_head.items()})
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
            drafted = model.mtp(read, model.model.embed_tokens(tokens[:, 1:]), model.model.rotary_emb)
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
