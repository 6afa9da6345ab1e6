"""The reference run on preferences: TRL's own loss functions and collators, on the CPU in fp32."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer
from trl.trainer.utils import add_fused_lm_head

from deltatune.selftest.parity.cases import STEPS
from deltatune.selftest.parity.families import Weights
from deltatune.selftest.parity.seeded import PAD

from . import pairs_ours
from .pairs import CASES, PairCase, TokenPair, checksums, pairs
from .record import PACKAGES, Comparison, Reference

Inputs = dict[str, Any]


def _trainer(kind: Any, case: PairCase, model: torch.nn.Module) -> Any:
    """One of TRL's trainers with the attributes that its loss reads; its constructor would want a data set of texts."""
    trainer = kind.__new__(kind)
    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = model
    trainer.beta, trainer.label_smoothing, trainer.loss_type = case.beta, case.smoothing, case.variant
    trainer.aux_loss_enabled = trainer.use_weighting = trainer.is_encoder_decoder = False
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    trainer.pad_token_id = trainer.padding_value = PAD
    return trainer


def _examples(case: PairCase, found: list[TokenPair]) -> list[Inputs]:
    """The rows for TRL's collators: pairs, or for KTO all chosen and then all rejected answers with the one before."""
    if case.loss != "kto":
        return [{"prompt_ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected} for pair in found]
    answers = [(pair.prompt, pair.chosen, True) for pair in found]
    answers += [(pair.prompt, pair.rejected, False) for pair in found]
    before = [answers[-1], *answers[:-1]]
    return [
        {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label}
        for (prompt, answer, label), (_, other, _) in zip(answers, before, strict=True)
    ]


class _Preference:
    """DPO or KTO, with trainers that read reference log-probabilities from the batch."""

    def __init__(self, case: PairCase, model: torch.nn.Module):
        kto = case.loss == "kto"
        # Before PEFT, as TRL asks; the injected adapters are found when it is called.
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        self._case, self._model = case, model
        self._trainer = _trainer(KTOTrainer if kto else DPOTrainer, case, model)
        self._trainer.precompute_ref_logps = True
        self._trainer.ld_alpha, self._trainer.f_divergence_type = None, "reverse_kl"
        self._trainer.loss_types, self._trainer.loss_weights = [case.variant], [1.0]
        if kto:
            self._trainer.loss_type, self._trainer.calculate_KL = "kto", True
            self._trainer.desirable_weight = self._trainer.undesirable_weight = 1.0
        self._collate = (DataCollatorForUnpairedPreference if kto else DataCollatorForPreference)(pad_token_id=PAD)

    def inputs(self, step: int) -> Inputs:
        """The batch of a step, with its reference: the model as it is."""
        found = self._collate(_examples(self._case, pairs(step)))
        if self._case.loss == "kto":
            return {**found, "ref_logps": self._logps(found), "ref_KL_logps": self._logps(found, "KL_")}
        chosen, rejected = self._logps(found).chunk(2)
        return {**found, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _logps(self, found: Inputs, prefix: str = "") -> torch.Tensor:
        tokens = found[f"{prefix}input_ids"]
        labels = tokens.masked_fill(found[f"{prefix}completion_mask"] == 0, -100)
        mask = found[f"{prefix}attention_mask"]
        with torch.no_grad():
            output = self._model(input_ids=tokens, attention_mask=mask, labels=labels, fused_lm_head=True)
        return output.log_probs.sum(-1)

    def loss(self, inputs: Inputs) -> torch.Tensor:
        return self._trainer._compute_loss(self._model, inputs, False)


class _WithoutReference:
    """ORPO, CPO or SimPO."""

    def __init__(self, case: PairCase, model: torch.nn.Module):
        self._model = model
        self._trainer = _trainer(ORPOTrainer if case.loss == "orpo" else CPOTrainer, case, model)
        self._trainer.alpha, self._trainer.simpo_gamma = 0.0, case.gamma
        self._trainer.cpo_alpha = 0.0 if case.loss == "simpo" else 1.0
        if case.loss == "simpo":
            self._trainer.loss_type = "simpo"

    def inputs(self, step: int) -> Inputs:
        """The batch of a step, padded as DPODataCollatorWithPadding does it."""
        found: Inputs = {}
        for side in ("chosen", "rejected"):
            rows = [(pair.prompt, getattr(pair, side)) for pair in pairs(step)]
            kinds = {
                "input_ids": ([prompt + answer for prompt, answer in rows], PAD),
                "attention_mask": ([[1] * len(prompt + answer) for prompt, answer in rows], 0),
                "labels": ([[-100] * len(prompt) + answer for prompt, answer in rows], -100),
            }
            for name, (lists, padding) in kinds.items():
                tensors = [torch.tensor(each) for each in lists]
                found[f"{side}_{name}"] = torch.nn.utils.rnn.pad_sequence(
                    tensors, batch_first=True, padding_value=padding
                )
        return found

    def loss(self, inputs: Inputs) -> torch.Tensor:
        return self._trainer.get_batch_loss_metrics(self._model, inputs)[0]


class PairComparison(Comparison):
    """Preferences, with TRL's loss."""

    folder, cases, packages, ours = "pairs/", CASES, (*PACKAGES, "trl"), staticmethod(pairs_ours.run)

    def loss(self, case: PairCase, model: torch.nn.Module, start: Reference) -> Callable[[int], torch.Tensor]:
        model.train()
        side = (_Preference if case.loss in ("dpo", "kto") else _WithoutReference)(case, model)
        batches = [side.inputs(step) for step in range(STEPS)]
        return lambda step: side.loss(batches[step])

    def checksums(self, case: PairCase, weights: Weights) -> dict[str, str]:
        return checksums(weights)


COMPARISON = PairComparison()
