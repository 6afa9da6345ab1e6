"""An order of batches that are sampled: each is made from answers of the model as it is trained so far.

The answers of a window of grad_accumulation_steps batches are sampled together, before its first one. Their randomness
depends on the seed and the number of the sampling alone, so that no random state must be saved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...data.batches.batch import Batch, RolloutBatch, bucket_widths, collate, pack
from ...data.batches.order import BatchOrder, TrainingOrder
from ...data.example import Example
from ...data.prompts import PromptExample
from ...machine.host_memory import as_numpy
from ...options.config import TrainConfig
from ..distributed import World
from ..evaluation.samples import written
from ..policy_loss import BNPO, CISPO, DAPO, DR_GRPO, MEAN_OF_ANSWERS, RLOO, needs_old, variant_of
from ..tree import iteration_key
from .answer_sampler import SampledAnswers
from .rewarded_sampler import RewardedSampler, figures, group_advantages, leave_one_out, names_of, total_rewards

# An advantage below this is rounding alone.
_LEAST_ADVANTAGE = 1e-6


@dataclass(frozen=True)
class Rollouts:
    """The sampled and scored answers of a window: N = P G of them, those to a prompt one after the other.

    `number` counts samplings, and `shares` says how many of the P prompts each batch of the window has. `rewards` are
    [functions, N]. `old` and `reference`, None where the loss needs none, are log-probabilities [N, M] in training
    before the first update, and of the reference model. All are float32; seconds are those of sampling and of the
    rewards.
    """

    number: int
    prompts: Sequence[PromptExample]
    shares: Sequence[int]
    answers: SampledAnswers
    rewards: np.ndarray
    seconds: tuple[float, float] = (0.0, 0.0)
    old: np.ndarray | None = None
    reference: np.ndarray | None = None

    def arrays(self) -> dict[str, mx.array]:
        """Return the saved arrays, by name."""
        named = {**vars(self.answers), "rewards": self.rewards, "old": self.old, "reference": self.reference}
        named |= {"ended": self.answers.ended.astype(np.int32), "number": np.array([self.number], np.int32)}
        return {name: mx.array(array) for name, array in named.items() if array is not None}

    @classmethod
    def saved(cls, arrays: Mapping[str, mx.array], batches: Sequence[Sequence[PromptExample]]) -> Rollouts:
        """Return the rollouts that arrays() saved, with the prompts of each batch."""
        named: dict[str, Any] = {name: as_numpy(array) for name, array in arrays.items()}
        named["ended"] = named["ended"].astype(bool)
        answers = SampledAnswers(**{field.name: named.pop(field.name) for field in fields(SampledAnswers)})
        return cls(int(named.pop("number")[0]), *_joined(batches), answers, **named)


def _joined(batches: Sequence[Sequence[PromptExample]]) -> tuple[list[PromptExample], list[int]]:
    """Return the prompts of all batches, and how many each has."""
    return [prompt for batch in batches for prompt in batch], [len(batch) for batch in batches]


@dataclass(frozen=True)
class Scoring:
    """Functions that give the log-probabilities [B, T] of a batch's targets in training's forward pass."""

    policy: Callable[[Batch], np.ndarray]
    reference: Callable[[Batch], np.ndarray]


@dataclass(eq=False)
class RolloutOrder(TrainingOrder):
    """An endless iterator of batches of sampled answers to this rank's prompts."""

    prompts: BatchOrder
    sampler: RewardedSampler
    scoring: Scoring
    config: TrainConfig
    world: World

    def __post_init__(self) -> None:
        self._variant = variant_of(self.config)
        self.figures = names_of(self.sampler.rewards.names)
        self._sampling = 0
        # How many batches of the present sampling were handed out, and the place of its prompts in the data.
        self._used = 0
        self._place = self.prompts.state()
        self._rollouts: Rollouts | None = None
        # The weighted sums of the rewards of their answers, [N], and the advantages.
        self._totals = np.zeros(0)
        self._advantages = np.zeros(0)

    def state(self) -> dict[str, Any]:
        return {"sampling": self._sampling, "used": self._used, "prompts": self._place}

    def arrays(self, state: Mapping[str, Any]) -> dict[str, mx.array]:
        """Return the present answers, where they are those of `state`."""
        rollouts = self._rollouts
        if rollouts is None or state.get("sampling") != rollouts.number:
            return {}
        return rollouts.arrays()

    def restore(self, state: dict[str, Any], arrays: Mapping[str, mx.array]) -> None:
        """Continue from a state and its arrays; a sampling that is half used and was not saved is left out."""
        self.prompts.restore(state["prompts"])
        self._sampling = state["sampling"]
        self._used = state["used"]
        self._place = state["prompts"]
        self._rollouts = None
        if arrays:
            self._take(Rollouts.saved(arrays, self._next_prompts()))
        elif self._used:
            self._next_prompts()
            self._end_sampling()

    def __next__(self) -> Batch:
        if self._rollouts is None or self._rollouts.number != self._sampling:
            self._take(self._sampled(self._next_prompts()))
        batch = self._batch(self._used % self.config.grad_accumulation_steps)
        self._used += 1
        if self._used == self.config.grad_accumulation_steps * self.config.num_iterations:
            self._end_sampling()
        return batch

    def samples(self) -> list[dict[str, str]]:
        """Return the best, the middle and the worst answer of the last sampling, each with its prompt and reward."""
        ranked = [number for number in np.argsort(-self._totals, kind="stable") if not np.isnan(self._totals[number])]
        if self._rollouts is None or not ranked:
            return []
        texts = self.sampler.texts(self._rollouts.answers)
        return [
            {
                "prompt": written(self._prompt(self._rollouts, number).question),
                "answer": texts[number],
                "reward": f"{self._totals[number]:.4g}",
            }
            for number in dict.fromkeys((ranked[0], ranked[len(ranked) // 2], ranked[-1]))
        ]

    def _end_sampling(self) -> None:
        self._sampling += 1
        self._used = 0
        self._place = self.prompts.state()

    def _next_prompts(self) -> list[Any]:
        """Return this rank's prompts of each batch of a window; one that the data do not fill has fewer."""
        return [self.prompts.next_examples() for _ in range(self.config.grad_accumulation_steps)]

    def _sampled(self, batches: Sequence[Sequence[PromptExample]]) -> Rollouts:
        """Sample answers to prompts, and reward them."""
        config = self.config
        prompts, shares = _joined(batches)
        # The first half of the split is the dropout's of an iteration.
        key = mx.random.split(iteration_key(config.seed, self._sampling, self.world.rank))[1]
        rollouts = Rollouts(self._sampling, prompts, shares, *self.sampler(prompts, key))
        if needs_old(config):
            rollouts = replace(rollouts, old=self._scored(rollouts, self.scoring.policy))
        if config.beta:
            rollouts = replace(rollouts, reference=self._scored(rollouts, self.scoring.reference))
        return rollouts

    def _scored(self, rollouts: Rollouts, score: Callable[[Batch], np.ndarray]) -> np.ndarray:
        """Return the log-probabilities [N, M] of all answers, computed a batch at a time."""
        scored = np.zeros_like(rollouts.answers.log_probabilities)
        rows = self.config.batch_size // self.world.size * self.config.num_generations
        for start in range(0, len(scored), rows):
            group = list(range(start, min(start + rows, len(scored))))
            # A model with a vision tower scores the tokens alone that have a weight.
            ones = np.ones(len(scored), np.float32)
            batch, places = self._laid_out(rollouts, group, ones, ones, rows)
            scores = score(batch)
            for number, place in zip(group, places, strict=True):
                scored[number, : rollouts.answers.lengths[number]] = scores[place]
        return scored

    def _take(self, rollouts: Rollouts) -> None:
        """Make these rollouts the present ones."""
        config = self.config
        size = self.config.num_generations
        totals = total_rewards(rollouts.rewards, self.sampler.rewards.weights)
        self._totals = totals
        if self._variant == RLOO:
            if rollouts.reference is not None and rollouts.old is not None:
                counted = self._counted(rollouts)[:, None]
                totals = totals - config.beta * ((rollouts.old - rollouts.reference) * counted).sum(axis=1)
            self._advantages = leave_one_out(totals.reshape(-1, size)).reshape(-1)
        else:
            everyone = None
            if config.scale_rewards == "batch" and self.world.size > 1:
                everyone = as_numpy(self.world.gather(mx.array(totals.astype(np.float32))))
            of_groups = group_advantages(totals.reshape(-1, size), config.scale_rewards, everyone)
            self._advantages = of_groups.reshape(-1)
        self._rollouts = rollouts

    def _counted(self, rollouts: Rollouts) -> np.ndarray:
        """Whether each answer counts in the loss, [N]."""
        answers = rollouts.answers
        return answers.ended if self.config.mask_truncated_completions else np.ones(len(answers.ended), bool)

    def _prompt(self, rollouts: Rollouts, number: int) -> PromptExample:
        return rollouts.prompts[number // self.config.num_generations]

    def _batch(self, step: int) -> Batch:
        """Build a batch of the window from the groups of answers that have a signal."""
        rollouts, config = self._rollouts, self.config
        assert rollouts is not None
        size = config.num_generations
        first = sum(rollouts.shares[:step])
        groups = range(first, first + rollouts.shares[step])
        numbers = [group * size + at for group in groups for at in range(size)]
        # A divergence from the reference is a signal, too.
        has_signal = bool(config.beta) and self._variant != RLOO
        judged = [
            group
            for group in groups
            if has_signal or np.abs(self._advantages[group * size : (group + 1) * size]).max() > _LEAST_ADVANTAGE
        ]
        weights, total = self._token_weights(rollouts, numbers)
        rows = [group * size + at for group in judged for at in range(size)]
        # Few numbers of rows are compiled: powers of two, in groups, up to those of a whole batch.
        most = config.batch_size // self.world.size
        room = min(2 ** max(len(judged) - 1, 0).bit_length(), most) * size
        batch, _ = self._laid_out(rollouts, rows, weights, self._advantages, room)
        assert batch.rollouts is not None
        of_sampling = batch.rollouts.figures
        if self._used == 0 and rollouts.prompts:
            of_sampling = figures(rollouts.rewards, self._totals.reshape(-1, size), rollouts.answers, rollouts.seconds)
        return replace(batch, rollouts=replace(batch.rollouts, total=np.array(total, np.float32), figures=of_sampling))

    def _token_weights(self, rollouts: Rollouts, numbers: Sequence[int]) -> tuple[np.ndarray, float]:
        """Return the weight [N] of each token of an answer in a batch's sum of losses, and the divisor of the sum."""
        counted = self._counted(rollouts)
        lengths = rollouts.answers.lengths
        weights = counted.astype(np.float32)
        tokens = float((lengths * counted)[list(numbers)].sum())
        if self._variant in MEAN_OF_ANSWERS:
            return weights / lengths, len(numbers)
        if self._variant == DR_GRPO:
            return weights, len(numbers) * self.config.max_completion_length
        if self._variant == BNPO:
            return weights / max(tokens, 1.0), 1.0
        assert self._variant in (DAPO, CISPO)
        return weights, tokens

    def _laid_out(
        self, rollouts: Rollouts, numbers: Sequence[int], weights: np.ndarray, advantages: np.ndarray, rows: int
    ) -> tuple[Batch, list[tuple[int, slice]]]:
        """Lay answers out in a batch, each behind its prompt: one in a row, or as documents that share rows.

        `numbers` are those of the answers; `weights` and `advantages` are [N], those of each token of an answer. The
        batch has `rows` rows, or as many at most where they are shared; those without an answer are blank. Returned
        beside it is the row and the positions of each answer.
        """
        answers = rollouts.answers
        documents = [self._document(rollouts, number) for number in numbers]
        positions = [document.positions for document in documents]
        packed = self.config.pack
        shared: list[tuple[int, ...]] = [(at,) for at in range(len(documents))]
        # Packed rows are as wide as the longest prompt with the longest answer, so that one width is compiled.
        width = self.prompts.widths[-1]
        if packed:
            shared = pack(positions, width)
            rows = min(2 ** max(len(shared) - 1, 0).bit_length(), rows)
        else:
            widths = bucket_widths(self.config.max_seq_length)
            width = widths[bisect_left(widths, max(positions, default=1))]
        filled = [[documents[at] for at in row] for row in shared]
        vision = self.prompts.vision
        batch = collate([*filled, *[[]] * (rows - len(filled))], width, packed=packed, vision=vision)
        placed = {"sampled": answers.log_probabilities, "old": rollouts.old, "reference": rollouts.reference}
        of_targets: dict[str, Any] = {name: np.zeros_like(batch.weights) for name in placed if placed[name] is not None}
        of_targets["advantages"] = np.zeros_like(batch.weights)
        places = _places(shared, documents)
        for number, place in zip(numbers, places, strict=True):
            for name in of_targets.keys() & placed.keys():
                of_targets[name][place] = placed[name][number, : answers.lengths[number]]  # type: ignore[index]
            of_targets["advantages"][place] = advantages[number]
            batch.weights[place] *= weights[number]
        blank = np.zeros((2, len(self.figures)), np.float32)
        beside = RolloutBatch(total=np.array(1, np.float32), figures=blank, **of_targets)
        return replace(batch, rollouts=beside), places

    def _document(self, rollouts: Rollouts, number: int) -> Example:
        """Return an answer behind its prompt."""
        answer = rollouts.answers.tokens[number, : rollouts.answers.lengths[number]]
        return self._prompt(rollouts, number).answered(answer)


def _places(rows: Sequence[Sequence[int]], documents: Sequence[Example]) -> list[tuple[int, slice]]:
    """Return the row of each document and the positions of its targets, where documents of a row follow one another."""
    places: dict[int, tuple[int, slice]] = {}
    for row, members in enumerate(rows):
        start = 0
        for at in members:
            document = documents[at]
            end = start + document.positions
            places[at] = (row, slice(end - int(document.targets.sum()), end))
            start = end
    return [places[at] for at in range(len(documents))]
