"""Parity of distillation: the divergences to compare with TRL's, and deltatune's side of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from deltatune.options.config import TrainConfig
from deltatune.selftest.parity import recording, seeded
from deltatune.selftest.parity.cases import Adapters, ParityCase, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.ours import adapt, as_batch, load, parts, train
from deltatune.train.batch_loss import LossFunction
from deltatune.train.distillation.distillation_loss import distillation_loss

from .pairs import two_layers


@dataclass(frozen=True)
class DistilledCase:
    """A divergence, and the options with which both sides compute it.

    Args:
        beta: From 0, forward, to 1, reverse.
        temperature: Divides both models' logits.
    """

    beta: float
    temperature: float = 1.0

    @property
    def model(self) -> ParityCase:
        """The model that learns."""
        return two_layers(draw=7, learning_rate=1e-2)

    @property
    def teacher(self) -> ParityCase:
        """The teacher: another draw of the same sizes."""
        return two_layers(draw=8, learning_rate=1e-2)


CASES = {"forward": DistilledCase(0.0), "reverse": DistilledCase(1.0, 0.7), "generalised": DistilledCase(0.1)}


def checksums(case: DistilledCase, weights: Weights) -> dict[str, str]:
    """The checksums of both drawn checkpoints and of the batches."""
    shapes = {name: value.shape for name, value in weights.items()}
    return recording.checksums(weights) | {"teacher": seeded.checksum(case.teacher.family.weights(shapes))}


def run(
    case: DistilledCase,
    config: Config,
    weights: Weights,
    adapters: Adapters,
    once_patched: Callable[[], None] = lambda: None,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    once_patched: called when the patches are in force.
    """
    model = load(case.model, config, weights)
    shapes = {name: value.shape for name, value in weights.items()}
    teacher = load(case.teacher, config, case.teacher.family.weights(shapes)).freeze()
    modules = adapt(case.model, model, adapters)
    options = TrainConfig(loss="distill", teacher="teacher", beta=case.beta, temperature=case.temperature)

    def prepare() -> LossFunction:
        once_patched()
        loss = distillation_loss(parts(model), teacher, options, compare=True)
        mx.eval(model.parameters())
        return loss

    family = case.model.family
    return train(
        model, modules, family.mlx_path, family.learning_rate, prepare, lambda index: as_batch(seeded.batch(index))
    )
