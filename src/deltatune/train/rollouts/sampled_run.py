"""Makes the batches of a run that samples answers, from the parts of the run.

In distillation, the model answers the prompts of some updates itself (on-policy): a draw by the seed and the number of
the update decides. Answers of an update are sampled together, by its random key and the weights before it: a run that
continues amid an update samples them again, with the same bits, and saves none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data.batches.batch import Batch, RolloutBatch
from ...data.batches.order import AnsweredOrder, BatchOrder, TrainingOrder
from ...data.batches.stream_order import StreamOrder
from ...data.example import Example
from ...lora.convert import without_adapters
from ...machine.host_memory import as_numpy
from ...models.load import Loaded
from ...options.config import TrainConfig
from ...patches import patched
from ...rewards import Rewards
from ..batch_loss import arrays, loss_of
from ..compiled import Compiled
from ..distributed import World
from ..ending.early_end import Ending
from ..ending.interrupt import InterruptedSamplingError
from ..evaluation.evaluate import evaluating
from ..preferences.objectives import TokenLosses, line
from ..reports.log import REWARD
from ..reports.screen import Screen
from ..setup import batch_order
from ..tree import iteration_key
from .answer_sampler import AnswerSampler
from .rewarded_sampler import ANSWERS, RewardedSampler, RewardEvaluation, answer_figures
from .rollout_order import RolloutOrder, Scoring

SHARE = "sampled/share"
# The draws of an update differ from those of an epoch with its number.
_DRAW = 1
# How many answers a report shows.
_SHOWN = 3


class StudentOrder(TrainingOrder):
    """An endless iterator of this rank's batches, in some of which answers of the model stand for those of the data."""

    figures = (SHARE, *ANSWERS)

    def __init__(self, data: AnsweredOrder | StreamOrder, sampler: AnswerSampler, config: TrainConfig, world: World):
        self._data = data
        self._sampler = sampler
        self._config = config
        self._world = world
        self._update = 0
        # How many batches of the present update were handed out, and the place of its first one in the data.
        self._used = 0
        self._place = data.state()
        self._batches: list[Batch] = []
        self._samples: list[dict[str, str]] = []

    def samples(self) -> list[dict[str, str]]:
        return self._samples

    def state(self) -> dict[str, Any]:
        return {"update": self._update, "used": self._used, "data": self._place}

    def restore(self, state: dict[str, Any], _arrays: Mapping[str, mx.array]) -> None:
        self._data.restore(state["data"])
        self._update = state["update"]
        self._used = state["used"]
        self._place = state["data"]
        self._batches = []

    def __next__(self) -> Batch:
        if not self._batches:
            self._batches = self._of_update()
        batch = self._batches[self._used]
        self._used += 1
        if self._used == len(self._batches):
            self._update += 1
            self._used = 0
            self._place = self._data.state()
            self._batches = []
        return batch

    def _of_update(self) -> list[Batch]:
        """Return the batches of the present update."""
        config = self._config
        count = config.grad_accumulation_steps
        nothing = [(0, 0)] * len(ANSWERS)
        self._samples = []
        if np.random.default_rng([config.seed % 2**64, self._update, _DRAW]).random() >= config.lmbda:
            return [_with_figures(next(self._data), [(0, 1), *nothing]) for _ in range(count)]
        prompts = [[document.prompt for document in self._data.next_examples()] for _ in range(count)]
        every = [prompt for of_batch in prompts for prompt in of_batch]
        started = time.perf_counter()
        # The first half of the split is the dropout's of an iteration.
        key = mx.random.split(iteration_key(config.seed, self._update, self._world.rank))[1]
        answers = self._sampler(every, key)
        figures = answer_figures(answers, time.perf_counter() - started) if every else nothing
        texts = zip(every[:_SHOWN], self._sampler.texts(answers), strict=False)
        self._samples = [{"prompt": self._sampler.text(p.tokens), "answer": text, REWARD: ""} for p, text in texts]
        rows = zip(every, answers.tokens, answers.lengths, strict=True)
        documents = (self._document(prompt, tokens[:length]) for prompt, tokens, length in rows)
        batches = [self._data.batch_of(list(islice(documents, len(of_batch)))) for of_batch in prompts]
        # The figures of the whole update stand beside its first batch.
        return [_with_figures(batch, [(1, 1), *(nothing if at else figures)]) for at, batch in enumerate(batches)]

    def _document(self, prompt: Example, answer: np.ndarray) -> Example:
        """Return an answer behind its prompt, as far as a row has room for it."""
        return prompt.answered(answer[: self._config.max_seq_length - len(prompt.tokens)])


def _with_figures(batch: Batch, pairs: list[tuple[float, int]]) -> Batch:
    return replace(batch, rollouts=RolloutBatch(np.array(pairs, np.float32).T))


def scoring_of(model: nn.Module, token_losses: TokenLosses) -> Scoring:
    """Return the functions that score answers in training's forward pass, each compiled once for each batch shape."""

    def log_probabilities(inputs: mx.array, targets: mx.array, _: mx.array, *more: Any) -> tuple[mx.array]:
        return (-token_losses(inputs, targets, *more[:-1]),)

    def compiled() -> Callable[[Batch], np.ndarray]:
        whole = Compiled(lambda batch: loss_of(log_probabilities, batch), [model.state])

        def score(batch: Batch) -> np.ndarray:
            with evaluating(model):
                return as_numpy(whole(arrays(batch))[0])

        return score

    of_policy, of_base = compiled(), compiled()

    def reference(batch: Batch) -> np.ndarray:
        with without_adapters(model):
            return of_base(batch)

    return Scoring(of_policy, reference)


def sampled_order(
    loaded: Loaded,
    config: TrainConfig,
    data: BatchOrder | StreamOrder,
    token_losses: TokenLosses | None,
    rewards: Rewards | None,
    ending: Ending,
    world: World,
) -> RolloutOrder | StudentOrder:
    """Return the batches of a run from its data, of rewarded answers where there are rewards.

    `loaded` is set up for training, and `token_losses`, which rewards need, are those under the sampled policy.
    `ending` is asked between two tokens whether the run ends.
    """

    def between() -> None:
        if ending.asks_to_stop():
            raise InterruptedSamplingError

    sampler = _sampler(loaded, config, data, between, world)
    if rewards is None:
        assert isinstance(data, AnsweredOrder | StreamOrder)
        return StudentOrder(data, sampler, config, world)
    assert token_losses is not None
    assert isinstance(data, BatchOrder)
    rewarded = RewardedSampler(sampler, rewards, between)
    return RolloutOrder(data, rewarded, scoring_of(loaded.model, token_losses), config, world)


def _sampler(
    loaded: Loaded, config: TrainConfig, data: BatchOrder | StreamOrder, between: Callable[[], None], world: World
) -> AnswerSampler:
    rows = config.batch_size // world.size * config.grad_accumulation_steps * config.rows_each * data.slots
    return AnswerSampler(loaded, config, rows, data.longest, between)


def say_reward(
    name: str,
    loaded: Loaded,
    config: TrainConfig,
    prompts: Sequence[Example],
    rewards: Rewards,
    world: World,
    screen: Screen,
) -> float:
    """Answer the prompts of a split, print its name and mean reward, and return the mean.

    A probability that is not finite raises NoResultError.
    """
    order = batch_order(prompts, config, world)
    sampler = RewardedSampler(_sampler(loaded, config, order, lambda: None, world), rewards, lambda: None)
    evaluation = RewardEvaluation(sampler, config, world)
    with patched():
        loss = evaluation(order, config.test_batches)
    assert loss is not None
    screen.say(f"{name} loss {loss:.4f}{line(evaluation.figures)}.")
    return -loss
