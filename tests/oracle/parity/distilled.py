"""Parity of distillation: the divergences to compare with TRL's, and deltatune's side of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from deltatune.data import Batch
from deltatune.data.batches.order import AnsweredOrder
from deltatune.data.example import Example
from deltatune.options.config import TrainConfig
from deltatune.selftest.parity import recording, seeded
from deltatune.selftest.parity.cases import Adapters, ParityCase, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.ours import adapt, as_batch, load, parts, train
from deltatune.train.batch_loss import LossFunction
from deltatune.train.distillation import distillation_loss
from deltatune.train.distributed import World
from deltatune.train.rollouts.answer_sampler import SampledAnswers
from deltatune.train.rollouts.sampled_run import StudentOrder

from .pairs import two_layers


@dataclass(frozen=True)
class DistilledCase:
    """A divergence from 0, forward, to 1, reverse, of logits that the temperature divides."""

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
    *,
    sampled: bool = False,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    once_patched: called when the patches are in force.
    sampled: whether the answers come as if the model had sampled them.
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

    def batch(index: int) -> Batch:
        rows = seeded.batch(index)
        return next(sampled_order(rows)) if sampled else as_batch(rows)

    family = case.model.family
    return train(model, modules, family.mlx_path, family.learning_rate, prepare, batch)


def sampled_order(rows: seeded.Rows) -> StudentOrder:
    """The order of one batch of data, of which the model samples the answers in these rows."""
    documents = [
        Example(tokens[:length], np.append(False, counts[: length - 1] > 0), str(row))
        for row, (tokens, counts, length) in enumerate(zip(rows.tokens, rows.counts, rows.lengths, strict=True))
    ]
    # The data have other answers.
    data = [document.prompt.answered(document.tokens[document.targets][::-1]) for document in documents]
    longest = rows.tokens.shape[1]
    options = TrainConfig(loss="distill", teacher="teacher", lmbda=1.0, max_seq_length=longest)
    order = AnsweredOrder(data, len(data), longest, answer=longest)
    return StudentOrder(order, _Sampler(documents), options, World())  # type: ignore[arg-type]


class _Sampler:
    """Gives the answers of documents, by their sources."""

    def __init__(self, documents: list[Example]):
        self._answers = {document.source: document.tokens[document.targets] for document in documents}

    def __call__(self, prompts: Sequence[Example], _key: mx.array) -> SampledAnswers:
        answers = [self._answers[prompt.source] for prompt in prompts]
        lengths = np.array([len(answer) for answer in answers], np.int32)
        tokens = np.zeros((len(answers), lengths.max()), np.int32)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer)] = answer
        nothing = np.zeros(tokens.shape, np.float32)
        return SampledAnswers(tokens, lengths, np.ones(len(answers), bool), nothing, nothing)

    def texts(self, answers: SampledAnswers) -> list[str]:
        return [""] * len(answers.lengths)

    def text(self, _tokens: np.ndarray) -> str:
        return ""
