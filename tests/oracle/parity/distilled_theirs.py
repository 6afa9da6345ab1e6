"""The reference run of distillation: TRL's divergence between two models of transformers, on the CPU in fp32."""

from __future__ import annotations

from functools import partial

import torch
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import BETAS, EPS, STEPS, WEIGHT_DECAY, Adapters, ParityRun, initial_adapters
from deltatune.selftest.parity.recording import Difference

from . import distilled, theirs
from . import record as text_record
from .distilled import DistilledCase
from .record import Reference, difference, moved, one_thread


def train(
    case: DistilledCase, model: torch.nn.Module, teacher: torch.nn.Module, parameters: theirs.Parameters
) -> ParityRun:
    """The recipe with TRL's loss; `parameters` are trained in place."""
    model.train()
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=case.model.family.learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    losses = []
    gradients: Adapters = {}
    for step in range(STEPS):
        rows = seeded.batch(step)
        tokens = torch.from_numpy(rows.tokens).long()
        present = (torch.arange(tokens.shape[1])[None] < torch.tensor(rows.lengths)[:, None]).long()
        hidden = partial(_hidden, tokens=tokens, present=present)
        with torch.no_grad():
            known = hidden(teacher)
        loss, _, _ = _chunked_divergence_loss(
            hidden(model),
            known,
            model.lm_head.weight,
            teacher.lm_head.weight,
            torch.from_numpy(rows.counts),
            case.beta,
            temperature=case.temperature,
        )
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = theirs.copied({key: parameter.grad for key, parameter in parameters.items()})
        optimizer.step()
        losses.append(loss.item())
    return ParityRun(losses, gradients, theirs.copied(parameters))


def _hidden(model: torch.nn.Module, tokens: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """The hidden states of all positions but the last, from which the following tokens are predicted."""
    return model.model(input_ids=tokens, attention_mask=present, use_cache=False).last_hidden_state[:, :-1]


def reference(case: DistilledCase, nudge: int = 0) -> Reference:
    """Run TRL on transformers and PEFT. nudge: a seed that moves every weight by about 1e-7 of itself."""
    config, shapes = theirs.layout(case.model)
    weights = taken = case.model.family.weights(shapes)
    if nudge:
        taken = moved(taken, nudge)
    with one_thread():
        model = theirs.load(config, taken)
        teacher = theirs.load(config, case.teacher.family.weights(shapes)).eval()
        targets = theirs.targets(case.model, model)
        parameters = theirs.adapt(case.model, model, initial_adapters(targets))
        initial = theirs.copied(parameters)
        run = train(case, model, teacher, parameters)
    return Reference(config, weights, targets, initial, run, float("inf"))


def compare(case: DistilledCase, base: Reference) -> Difference:
    """Run deltatune from the same start and say how far it is from TRL."""
    return difference(base, distilled.run(case, base.config, base.weights, initial_adapters(base.targets)))


def nudged(case: DistilledCase, base: Reference) -> Difference:
    """How far TRL drifts from itself when its weights move a little."""
    return text_record.nudged(case, base, reference)


def record(name: str, case: DistilledCase) -> tuple[Reference, Difference]:
    """Write the recording of a case. ValueError where its trajectory could not tell a fault from rounding."""
    base = reference(case)
    drift = nudged(case, base)
    packages = (*text_record.PACKAGES, "trl")
    text_record.write(f"distilled/{name}", base, drift, distilled.checksums(case, base.weights), packages)
    return base, drift
