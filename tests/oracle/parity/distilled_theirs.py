"""The reference run of distillation: TRL's divergence between two models of transformers, on the CPU in fp32."""

from collections.abc import Callable

import torch
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.families import Weights

from . import distilled
from .distilled import CASES, DistilledCase
from .record import PACKAGES, Comparison, Reference


class DistilledComparison(Comparison):
    """Distillation, with TRL's loss."""

    folder, cases, packages, ours = "distilled/", CASES, (*PACKAGES, "trl"), staticmethod(distilled.run)

    def loss(self, case: DistilledCase, model: torch.nn.Module, start: Reference) -> Callable[[int], torch.Tensor]:
        shapes = {name: value.shape for name, value in start.weights.items()}
        teacher = self.load(start.config, case.teacher.family.weights(shapes)).eval()

        def loss_of(step: int) -> torch.Tensor:
            rows = seeded.batch(step)
            with torch.no_grad():
                known = _hidden(teacher, rows)
            heads = model.lm_head.weight, teacher.lm_head.weight
            counts = torch.from_numpy(rows.counts)
            return _chunked_divergence_loss(
                _hidden(model, rows), known, *heads, counts, case.beta, temperature=case.temperature
            )[0]

        return loss_of

    def checksums(self, case: DistilledCase, weights: Weights) -> dict[str, str]:
        return distilled.checksums(case, weights)


def _hidden(model: torch.nn.Module, rows: seeded.Rows) -> torch.Tensor:
    """The hidden states of all positions but the last, from which the following tokens are predicted."""
    tokens = torch.from_numpy(rows.tokens).long()
    present = (torch.arange(tokens.shape[1])[None] < torch.tensor(rows.lengths)[:, None]).long()
    return model.model(input_ids=tokens, attention_mask=present, use_cache=False).last_hidden_state[:, :-1]


COMPARISON = DistilledComparison()
