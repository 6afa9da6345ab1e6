"""Thirty updates on recorded rollouts of a model: the rollouts of each sampling, and deltatune's side of the run."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from deltatune.data import Batch
from deltatune.data.batches.order import BatchOrder
from deltatune.data.prompts import PromptExample
from deltatune.options.config import TrainConfig
from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import Adapters, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.ours import adapt, load, parts, train
from deltatune.train.batch_loss import LossFunction
from deltatune.train.distributed import World
from deltatune.train.policy_loss import rollout_loss
from deltatune.train.preferences.objectives import chunked_token_losses
from deltatune.train.rollouts.answer_sampler import SampledAnswers
from deltatune.train.rollouts.rewarded_sampler import RewardedSampler
from deltatune.train.rollouts.rollout_order import RolloutOrder
from deltatune.train.rollouts.sampled_run import scoring_of

from .distilled import DistilledCase
from .rollouts import ANSWERS, GENERATIONS, PROMPTS, Case

MODEL = DistilledCase(1.0).model
MOST, PROMPT = 24, 5
COMMON = {"max_completion_length": MOST, "max_seq_length": 64, "sampler_correction": "none", "temperature": 1.0}
CASES = {
    "one pass": Case(COMMON, moved=False),
    "two passes": Case(COMMON),
    "two passes of grpo": Case(COMMON | {"loss_variant": "grpo", "epsilon": 0.05}),
}


@dataclass(frozen=True)
class Sampling:
    """The answers of a sampling: prompts [P, 5], tokens [N, M], lengths [N] and rewards [N]."""

    prompts: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray


def sampling(number: int) -> Sampling:
    """Draw the answers of a sampling; the reward is the share of tokens below the middle of the vocabulary."""
    draw = seeded.generator(f"rollouts {number}")
    # The prompts are the same in each sampling.
    prompts = (seeded.generator("prompts").random((PROMPTS, PROMPT)) * seeded.VOCAB).astype(np.int32)
    tokens = (draw.random((ANSWERS, MOST)) * seeded.VOCAB).astype(np.int32)
    lengths = (1 + draw.random(ANSWERS) * MOST).astype(np.int32)
    present = np.arange(MOST) < lengths[:, None]
    rewards = ((tokens < seeded.VOCAB // 2) & present).sum(axis=1) / lengths
    return Sampling(prompts, np.where(present, tokens, 0), lengths, rewards.astype(np.float32))


class _Recorded:
    """Gives the answers of one sampling after the other, and their rewards."""

    names = ("share",)
    weights = np.ones(1)

    def __init__(self) -> None:
        self._number = -1
        self._rows: list[int] = []

    def sampled(self, prompts: list[PromptExample], _key: mx.array) -> SampledAnswers:
        self._number += 1
        self._rows = [int(prompt.source) * GENERATIONS + at for prompt in prompts for at in range(GENERATIONS)]
        answers = sampling(self._number)
        nothing = np.zeros((ANSWERS, MOST), np.float32)
        return SampledAnswers(
            answers.tokens[self._rows], answers.lengths[self._rows], np.ones(ANSWERS, bool), nothing, nothing
        )

    def __call__(self, *_: Any) -> np.ndarray:
        return sampling(self._number).rewards[None, self._rows]


class _Sampler:
    def __init__(self, recorded: _Recorded):
        self._recorded = recorded

    def __call__(self, prompts: list[PromptExample], key: mx.array) -> SampledAnswers:
        return self._recorded.sampled(prompts, key)

    def texts(self, _answers: SampledAnswers) -> list[str]:
        return [""] * ANSWERS


def run(config: TrainConfig, saved: Config, weights: Weights, adapters: Adapters) -> ParityRun:
    """Train the Hugging Face save `saved` and `weights` from the initial `adapters` on the rollouts."""
    model = load(MODEL, saved, weights)
    modules = adapt(MODEL, model, adapters)
    orders: list[RolloutOrder] = []

    def prepare() -> LossFunction:
        token_losses = chunked_token_losses(*parts(model))
        mx.eval(model.parameters())
        recorded = _Recorded()
        prompts = [
            PromptExample(tokens, np.zeros(PROMPT, bool), str(at), most=MOST)
            for at, tokens in enumerate(sampling(0).prompts)
        ]
        sampler = RewardedSampler(_Sampler(recorded), recorded, lambda: None)  # type: ignore[arg-type]
        of_data: Any = BatchOrder(prompts, PROMPTS, config.max_seq_length)
        orders.append(RolloutOrder(of_data, sampler, scoring_of(model, token_losses), config, World()))
        return rollout_loss(token_losses, config)

    def batch(_index: int) -> Batch:
        return next(orders[0])

    return train(model, modules, MODEL.family.mlx_path, MODEL.family.learning_rate, prepare, batch)
