"""Replays a recorded run of TRL with deltatune's preference loss, reference and step."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from deltatune.data import Batch, Example, collate
from deltatune.data.preferences.preference import Preference, completed, lay_out
from deltatune.options.config import TrainConfig
from deltatune.selftest.parity.cases import STEPS, Adapters, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.ours import adapt, load, parts, train
from deltatune.train.batch_loss import LossFunction, arrays
from deltatune.train.preferences.objectives import (
    TokenLosses,
    answers_of,
    chunked_token_losses,
    objective_of,
    preference_loss,
)

from .pairs import PairCase, pairs

# No document is longer. The step is compiled once.
WIDTH = 40


def options(case: PairCase) -> TrainConfig:
    """The options of a run with the loss of `case`."""
    return TrainConfig(
        loss=case.loss, loss_variant=case.variant, beta=case.beta, gamma=case.gamma, label_smoothing=case.smoothing
    )


def preferences(case: PairCase, step: int) -> list[Preference]:
    """The preferences of a step, as deltatune's data code gives them."""

    def document(prompt: list[int], answer: list[int]) -> Example:
        tokens = np.array([*prompt, *answer], np.int32)
        return Example(tokens, np.arange(len(tokens)) >= len(prompt), f"step {step}")

    read = [
        Preference((document(pair.prompt, pair.chosen), document(pair.prompt, pair.rejected))) for pair in pairs(step)
    ]
    return completed(read, options(case), [])


def batch(preferences: list[Preference]) -> Batch:
    """The batch of these preferences, with a row for each document."""
    rows, held = lay_out([[number] for number in range(len(preferences))], preferences, 1, WIDTH, packed=False)
    return replace(collate(rows, WIDTH, packed=False), preferences=held)


def fill(token_losses: TokenLosses, steps: list[list[Preference]]) -> None:
    """Set the references of all preferences to the log-probabilities of the model as it is."""
    for preferences in steps:
        inputs, targets, weights, *_, held = arrays(batch(preferences))
        assert held is not None
        policy = np.array(answers_of(token_losses(inputs, targets), weights, held).policy)
        for one, values in zip(preferences, policy, strict=True):
            one.reference[:] = values


def run(
    case: PairCase,
    config: Config,
    weights: Weights,
    adapters: Adapters,
    once_patched: Callable[[], None] = lambda: None,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    once_patched: called when the patches are in force.
    """
    model: nn.Module = load(case.model, config, weights)
    modules = adapt(case.model, model, adapters)
    settings = options(case)
    objective = objective_of(settings)
    assert objective is not None
    steps = [preferences(case, step) for step in range(STEPS)]

    def prepare() -> LossFunction:
        once_patched()
        token_losses = chunked_token_losses(*parts(model))
        if objective.needs_reference:
            fill(token_losses, steps)
        mx.eval(model.parameters())
        return preference_loss(token_losses, objective, settings)

    family = case.model.family
    return train(model, modules, family.mlx_path, family.learning_rate, prepare, lambda index: batch(steps[index]))
