"""Recorded rollouts on which deltatune and TRL compute advantages, losses and gradients, and deltatune's side of it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from deltatune.data import Batch
from deltatune.data.batches.order import BatchOrder
from deltatune.data.prompts import PromptExample
from deltatune.models.generate import SampledPolicy
from deltatune.options.config import TrainConfig
from deltatune.train.batch_loss import arrays, loss_of
from deltatune.train.distributed import World
from deltatune.train.policy_loss import rollout_loss
from deltatune.train.rollouts.answer_sampler import SampledAnswers
from deltatune.train.rollouts.rewarded_sampler import RewardedSampler
from deltatune.train.rollouts.rollout_order import RolloutOrder, Scoring

PROMPTS, GENERATIONS, MOST, VOCABULARY = 3, 4, 6, 11
ANSWERS = PROMPTS * GENERATIONS
RECORDED = Path(__file__).with_name("rollouts_recorded.json")
# The name of a prompt, and the tokens of the first; each other has one more.
_ROW, _FIRST = "row ", 3
# The group of answers that all get the same reward.
ALIKE = 1


@dataclass(frozen=True)
class Case:
    """Options of TrainConfig, and whether the policy has moved since it sampled, as in a second pass."""

    options: dict[str, Any] = field(default_factory=dict)
    moved: bool = True

    @property
    def config(self) -> TrainConfig:
        passes = {"num_iterations": 2} if self.moved else {}
        common = {"loss": "grpo", "batch_size": PROMPTS, "num_generations": GENERATIONS, "temperature": 0.8}
        return TrainConfig(**common | {"max_completion_length": MOST, "max_seq_length": 32} | passes | self.options)


CASES = {variant: Case({"loss_variant": variant}) for variant in ("dapo", "grpo", "dr_grpo", "bnpo", "gspo")} | {
    # TRL's RLOO corrects no sampler.
    "rloo": Case({"loss_variant": "rloo", "sampler_correction": "none"}),
    "cispo": Case({"loss_variant": "cispo", "epsilon_high": 1.1}),
    "one pass": Case(moved=False),
    "one pass of gspo": Case({"loss_variant": "gspo"}, moved=False),
    "a higher limit": Case({"epsilon": 0.1, "epsilon_high": 0.3}),
    "a reference": Case({"beta": 0.3}),
    "a reference in one pass": Case({"beta": 0.3}, moved=False),
    "a reference of grpo": Case({"beta": 0.3, "loss_variant": "grpo"}),
    "a reference of rloo": Case({"beta": 0.3, "loss_variant": "rloo", "sampler_correction": "none"}),
    "the deviation of the batch": Case({"scale_rewards": "batch"}),
    "no deviation": Case({"scale_rewards": "none"}),
    "answers with an end": Case({"mask_truncated_completions": True}),
    "answers of grpo with an end": Case({"mask_truncated_completions": True, "loss_variant": "grpo"}),
    "a correction of answers": Case({"sampler_correction": "sequence"}),
    "no correction": Case({"sampler_correction": "none"}),
}


@dataclass(frozen=True)
class Content:
    """The rollouts: logits [N, M, V] of the policy that sampled, of the present one, and of a reference."""

    tokens: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    rewards: np.ndarray
    before: np.ndarray
    now: np.ndarray
    reference: np.ndarray
    noise: np.ndarray

    def log_probabilities(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        """Return the log-probabilities [N, M] of the answers' tokens, in fp32; 0 behind an answer."""
        scaled = logits.astype(np.float64) / temperature
        scaled = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
        chosen = np.take_along_axis(scaled, self.tokens[..., None], axis=-1)[..., 0]
        return np.where(self.mask, chosen, 0).astype(np.float32)

    @property
    def mask(self) -> np.ndarray:
        return np.arange(MOST) < self.lengths[:, None]


def content(case: Case) -> Content:
    random = np.random.default_rng(7)
    lengths = random.integers(1, MOST + 1, ANSWERS).astype(np.int32)
    lengths[[0, 5]] = MOST
    tokens = random.integers(1, VOCABULARY, (ANSWERS, MOST)).astype(np.int32)
    ended = lengths < MOST
    tokens[~ended, MOST - 1] = 3
    tokens[np.flatnonzero(ended), lengths[ended] - 1] = 1
    tokens[np.arange(MOST) >= lengths[:, None]] = 0
    rewards = random.uniform(0, 1, (2, ANSWERS)).astype(np.float32)
    rewards[:, ALIKE * GENERATIONS : (ALIKE + 1) * GENERATIONS] = 0.5
    # One answer without any reward, and one that a single function judged.
    rewards[:, 2] = np.nan
    rewards[1, 9] = np.nan
    shape = (ANSWERS, MOST, VOCABULARY)
    before, change, other = (random.normal(0, size, shape).astype(np.float32) for size in (1.5, 0.4, 0.5))
    now = before + change if case.moved else before
    noise = random.normal(0, 0.5, (ANSWERS, MOST)).astype(np.float32)
    return Content(tokens, lengths, ended, rewards, before, now, before + other, noise)


def of_rows(gradient: np.ndarray) -> list[float]:
    """Return one number for the gradient of each answer's logits [N, M, V], which any change of it changes."""
    direction = np.random.default_rng(1).normal(0, 1, gradient.shape[1:])
    return (np.asarray(gradient, np.float64) * direction).sum(axis=(1, 2)).tolist()


class _Sampler:
    """Gives the recorded answers to prompts, and keeps their numbers in the order in which they were asked for."""

    def __init__(self, recording: Content, temperature: float):
        self._recording = recording
        self._temperature = temperature
        self.numbers: list[int] = []

    def __call__(self, asked: list[PromptExample], _key: mx.array) -> SampledAnswers:
        held = self._recording
        groups = [int(prompt.source.removeprefix(_ROW)) for prompt in asked]
        self.numbers += [group * GENERATIONS + at for group in groups for at in range(GENERATIONS)]
        sampled = held.log_probabilities(held.before, self._temperature) + held.noise
        sampled = np.where(held.mask, sampled, 0).astype(np.float32)[self.numbers]
        answers = (held.tokens[self.numbers], held.lengths[self.numbers], held.ended[self.numbers])
        return SampledAnswers(*answers, sampled, np.zeros_like(sampled))

    def texts(self, _answers: SampledAnswers) -> list[str]:
        return [""] * ANSWERS

    def spans(self, batch: Batch) -> list[tuple[int, int, slice]]:
        """Return the row of each answer in a batch, its number, and the positions of its targets."""
        spans = []
        for row, documents in enumerate(batch.sources):
            for source in documents:
                group = int(source.removeprefix(_ROW))
                number = group * GENERATIONS + row % GENERATIONS
                first = _FIRST + group - 1
                spans.append((row, number, slice(first, first + self._recording.lengths[number])))
        return spans

    def placed(self, logits: np.ndarray, batch: Batch) -> np.ndarray:
        """Put the logits of answers where a batch has their targets."""
        rows = np.zeros((*batch.targets.shape, VOCABULARY), np.float32)
        for row, number, span in self.spans(batch):
            rows[row, span] = logits[number, : span.stop - span.start]
        return rows


class _Rewards:
    """Gives the recorded rewards of the answers that a sampler has given."""

    names = ("one", "other")
    weights = np.ones(2)

    def __init__(self, recording: Content, sampler: _Sampler):
        self._recording = recording
        self._sampler = sampler

    def __call__(self, *_: Any) -> np.ndarray:
        return self._recording.rewards[:, self._sampler.numbers]

    def close(self) -> None:
        """Nothing is to be ended."""


def _losses(policy: SampledPolicy, logits: mx.array, targets: mx.array) -> mx.array:
    of_policy = policy.logits(logits)
    chosen = mx.take_along_axis(of_policy, targets[..., None], axis=-1)[..., 0]
    return mx.logsumexp(of_policy, axis=-1) - chosen


def ours(case: Case) -> dict[str, Any]:
    """Return the advantages, the loss, and the numbers of its gradients, through the order of batches and the loss."""
    config, recording = case.config, content(case)
    policy, sampler = SampledPolicy.of(config), _Sampler(recording, config.temperature)
    lengths = [_FIRST + at for at in range(PROMPTS)]
    prompts = [
        PromptExample(np.arange(1, length + 1, dtype=np.int32), np.zeros(length, bool), f"{_ROW}{at}", most=MOST)
        for at, length in enumerate(lengths)
    ]

    def scored(logits: np.ndarray) -> Any:
        return lambda batch: (
            -np.array(_losses(policy, mx.array(sampler.placed(logits, batch)), mx.array(batch.targets)))
        )

    scoring = Scoring(scored(recording.before), scored(recording.reference))
    rewarded = RewardedSampler(sampler, _Rewards(recording, sampler), lambda: None)  # type: ignore[arg-type]
    of_data: Any = BatchOrder(prompts, PROMPTS, 32)
    batch = next(RolloutOrder(of_data, rewarded, scoring, config, World()))
    step_arrays = arrays(batch)

    def loss(logits: mx.array) -> mx.array:
        of_tokens = rollout_loss(lambda _, targets: _losses(policy, logits, targets), config)
        total, divisor, _ = loss_of(of_tokens, step_arrays)
        return total / divisor

    value, gradient = mx.value_and_grad(loss)(mx.array(sampler.placed(recording.now, batch)))
    whole, advantages = np.zeros((ANSWERS, MOST, VOCABULARY)), np.zeros(ANSWERS)
    assert batch.rollouts is not None
    for row, number, span in sampler.spans(batch):
        whole[number, : span.stop - span.start] = np.array(gradient)[row, span]
        advantages[number] = batch.rollouts.advantages[row, span.start]
    return {"loss": value.item(), "advantages": advantages.tolist(), "gradients": of_rows(whole)}


def recorded() -> dict[str, SimpleNamespace]:
    """Return the numbers that TRL gave, by case."""
    return {name: SimpleNamespace(**values) for name, values in json.loads(RECORDED.read_text()).items()}
