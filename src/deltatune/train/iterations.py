"""The iterations of a run, one after another, and the evaluations, samples, reports and saves between them.

Their order depends only on the saved state, so that a run killed anywhere continues to the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from ..data import Batch, BatchOrder
from ..errors import NoResultError, UserError
from ..ops.functional import is_finite
from ..options.config import TrainConfig
from ..rewards import RewardError
from .by_layer.store import Store
from .distributed import World
from .ending.early_end import Ending
from .ending.interrupt import InterruptedSamplingError
from .engine import Engine
from .evaluation import nonfinite
from .evaluation.evaluate import Evaluation
from .evaluation.samples import Samples
from .freed_memory import FreedMemory
from .reports.reporting import Reporting
from .reports.screen import Screen
from .rollouts.rewarded_sampler import RewardEvaluation
from .rollouts.rollout_order import RolloutOrder
from .saved.outputs import Outputs
from .saving import Saving
from .setup import Training
from .tree import leaves
from .updates.routers import router_figures

# Iterations of more seconds are not worth an early start, and a second Ctrl-C has to wait for one that began early.
LONGEST = 1.0
# The answers to more prompts than these take a time that is announced.
_FEW_PROMPTS = 3


class StopTraining(Exception):  # noqa: N818 (a request, and no error)
    """A callback raises it to end the run in order: everything is saved, and the results are returned."""


class Callbacks(NamedTuple):
    """The functions that a run calls, on every rank; values are the same on all ranks but for times.

    Attributes:
        on_report: Takes the record of a training report, as metrics.jsonl has it.
        on_evaluation: Takes the record of an evaluation.
        on_save: Takes the output folder after a save.
    """

    on_report: Callable[[dict[str, Any]], object] | None = None
    on_evaluation: Callable[[dict[str, Any]], object] | None = None
    on_save: Callable[[Path], object] | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of a run before its model is patched.

    `valid_order` are the batches of an evaluation, where there are validation examples; `weights` is the store of the
    layers' weights, where `config.memory` bounds the run.
    """

    model: nn.Module
    config: TrainConfig
    world: World
    screen: Screen
    outputs: Outputs
    valid_order: BatchOrder | None
    samples: Samples
    reporting: Reporting
    weights: Store | None
    callbacks: Callbacks


@dataclass(eq=False)
class Iterations:
    """Runs the iterations of a run; `trained` has the loss and layers of the patched model (setup.training)."""

    parts: Parts
    engine: Engine
    saving: Saving
    ending: Ending
    trained: Training
    freed_memory: FreedMemory

    def __post_init__(self) -> None:
        self.state = self.engine.state
        self.progress = self.engine.state.progress
        self._watched = nonfinite.watched(self.trained.layers)
        self._figures = self.trained.figures + router_figures(self.parts.model)
        order = self.engine.state.order
        # By rewards, where the batches are sampled by them.
        self._evaluation: Evaluation | RewardEvaluation
        if isinstance(order, RolloutOrder):
            self._evaluation = RewardEvaluation(order.sampler, self.parts.config, self.parts.world)
        else:
            self._evaluation = Evaluation(self.parts.model, self.trained, self.parts.world, self.parts.weights)
        self._stopped = False
        # The batches since the last update, among which the cause of a loss that is not finite is looked for.
        self._batches: list[Batch] = []

    def run(self) -> None:
        """Train until the last iteration, or until the validation loss has stopped improving; save the last state."""
        config = self.parts.config
        progress = self.progress
        # Whether the run is to stop: several ranks agree on it in an iteration, a single one also between them.
        asked = False
        while True:
            asked = self.ending.asks_to_stop() or asked
            if not asked and self._evaluation_is_due():
                asked = not self._evaluate()
            done = progress.iteration >= config.iters or self.ended_early()
            if not asked and self.parts.samples.are_due(progress, last=done):
                asked = not self._sample()
            if asked and not done:
                self._save(stopping=True)
                self.ending.in_order()
                raise self.ending.stopped()
            if done:
                self._save(finished=True)
                return
            before = progress.iteration
            if before > 0 and before % config.save_every == 0 and before != self.saving.saved:
                self._save()
            asked = self._iterate()
            # A sampling that was left makes no iteration.
            if progress.iteration == before:
                continue
            if progress.iteration % config.steps_per_report == 0 or progress.iteration >= config.iters:
                rate = self.state.step.optimizer.learning_rate.item()
                record = self.parts.reporting.training(progress, rate, self._figures)
                self._call(self.parts.callbacks.on_report, record)
                # Some of the answers that the last update learnt from.
                if self.parts.world.main and (answers := self.state.order.samples()):
                    self.parts.reporting.samples(self.progress, answers)

    def _evaluation_is_due(self) -> bool:
        config = self.parts.config
        at = self.progress.iteration
        if self.parts.valid_order is None or config.val_batches == 0 or self.progress.evaluated == at:
            return False
        return at == 0 or at % config.steps_per_eval == 0 or at >= config.iters

    def _evaluate(self) -> bool:
        """Evaluate and report; return False if interrupted, so that a resumed run starts with this evaluation."""
        parts = self.parts
        progress = self.progress
        started = time.perf_counter()
        self.freed_memory.begin("evaluation")
        assert parts.valid_order is not None

        def between(done: int, total: int) -> bool:
            parts.screen.evaluating(done, total)
            return self.ending.asks_to_stop()

        try:
            loss = self._evaluation(parts.valid_order, parts.config.val_batches, between)
        except (NoResultError, RewardError) as error:
            raise self._saved_before(error) from error
        if loss is None:
            return False
        progress.evaluated = progress.iteration
        record = {"iteration": progress.iteration, "val_loss": loss, "val_time": time.perf_counter() - started}
        record |= {f"val_{name}": value for name, value in self._evaluation.figures.items()}
        progress.val_loss = loss
        # Without a target to count, the loss is NaN, which is no best.
        best = not math.isnan(loss) and (progress.best_loss is None or loss < progress.best_loss)
        parts.reporting.report(progress, record, best=best)
        self._call(parts.callbacks.on_evaluation, record)
        if best:
            progress.best_loss = loss
            progress.evaluations_without_gain = 0
            progress.best_iteration = progress.iteration
            # Before the first iteration nothing is trained: the model as it came is not worth a copy.
            if progress.iteration:
                self._on_every_rank(lambda: self.saving.save_best(loss))
        else:
            progress.evaluations_without_gain += 1
        if self.out_of_patience():
            parts.screen.say(
                f"Stopping early after iteration {progress.iteration:,}: {progress.evaluations_without_gain:,} "
                f"evaluations without a loss below {progress.best_loss:.4f}."
            )
        return True

    def _saved_before(self, error: UserError, remedy: str = "") -> UserError:
        """Save the state of the last update, and return the error, which every rank raises, with where that is."""
        self.ending.in_order()
        at = self.progress.iteration
        if at == 0:
            return error
        self.saving.save_last_update()
        saved = f"The state after iteration {self.progress.iteration:,} is saved in {self.parts.outputs.state.parent}"
        return UserError(f"after iteration {at:,}: {error} {saved}{remedy}.")

    def _sample(self) -> bool:
        """Answer the prompts and report it; return False if interrupted, so that a resumed run starts with this."""
        parts = self.parts
        self.freed_memory.begin("samples")
        if (count := len(parts.samples.prompts)) > _FEW_PROMPTS:
            parts.screen.say(f"Answering {count:,} sample prompts.")
        try:
            answers = parts.samples.on_main(parts.world, self.ending)
        except NoResultError as error:
            raise self._saved_before(error) from error
        except UserError:
            # Rank 0 answers, and every rank raises its error.
            self.ending.in_order()
            raise
        if answers is None:
            return False
        self.progress.sampled = self.progress.iteration
        if parts.world.main:
            parts.reporting.samples(self.progress, answers)
        return True

    def _call(self, callback: Callable[[Any], object] | None, value: Any) -> None:
        if callback is None:
            return
        stops = False
        try:
            callback(value)
        except StopTraining:
            stops = True
        if self.parts.world.sum_numbers(float(stops))[0] and not self._stopped:
            self._stopped = True
            self.parts.screen.say(
                f"Stopping early after iteration {self.progress.iteration:,}: a callback ends the run."
            )

    def ended_early(self) -> bool:
        """Whether the run ends before its last iteration, by a callback or since the loss stopped improving."""
        return self._stopped or self.out_of_patience()

    def out_of_patience(self) -> bool:
        """Whether so many evaluations in a row were no better that the run ends (config.early_stopping)."""
        patience = self.parts.config.early_stopping
        return patience is not None and self.progress.evaluations_without_gain >= patience

    def _iterate(self) -> bool:
        """Run a micro-batch, and the update if it is due; return whether any rank was asked to stop."""
        progress = self.progress
        started = time.perf_counter()
        if progress.micro_batches == 0:
            self._batches = []
        self.state.begin_micro_batch()
        try:
            batch = self._next_batch()
        except InterruptedSamplingError:
            return True
        self._batches.append(batch)
        self.freed_memory.begin("training")
        advance = self.engine.advance(batch, self._goes_on())
        progress.iteration += 1
        if not (math.isfinite(advance.loss) and math.isfinite(advance.norm or 0.0)):
            self._fail(advance.loss, advance.norm)
        if advance.norm is not None:
            progress.grad_norm = advance.norm
            self.state.end_window()
        progress.add(advance)
        self.freed_memory.after_iteration()
        seconds = time.perf_counter() - started
        progress.seconds += seconds
        loss = advance.loss / advance.weight if advance.weight else None
        self.parts.reporting.iteration(progress, seconds, int(advance.tokens), loss)
        return advance.asked > 0

    def _next_batch(self) -> Batch:
        """Return the next batch; where a row of a stream is no example, or a reward fails, the state is saved first."""
        if self.parts.config.samples_answers:
            self.freed_memory.begin("sampling")
        try:
            return self.trained.taught(next(self.state.order))
        except UserError as error:
            raise self._saved_before(error, "; mend that and give --resume") from error

    def _goes_on(self) -> bool:
        """Whether the next iteration follows the present one directly, and is short enough to be started early."""
        parts = self.parts
        at = self.progress.iteration + 1
        config = parts.config
        if at >= config.iters or self.ending.stop.asked or parts.reporting.last_seconds > LONGEST:
            return False
        due = [config.save_every]
        if parts.callbacks.on_report is not None:
            due.append(config.steps_per_report)
        if parts.samples.prompts or (parts.valid_order is not None and config.val_batches):
            due.append(config.steps_per_eval)
        return all(at % interval for interval in due)

    def _save(self, *, finished: bool = False, stopping: bool = False) -> None:
        self._on_every_rank(lambda: self.saving.save(finished=finished, stopping=stopping))
        self._call(self.parts.callbacks.on_save, self.parts.outputs.directory)

    def _on_every_rank(self, action: Callable[[], None]) -> None:
        """Do an action that raises a UserError on every rank if it raises one on any."""
        try:
            action()
        except UserError:
            self.ending.in_order()
            raise

    def _fail(self, loss: float, norm: float | None) -> None:
        """Raise for a loss or gradient that is not finite, after saving the last good state and finding the cause."""
        parts = self.parts
        at = self.progress.iteration
        parts.screen.stop()
        self.engine.settle()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        self.ending.in_order()
        self.state.end_update()
        damage = nonfinite.damage(parts.model, parts.weights)
        trained = leaves(parts.model.trainable_parameters())
        worth_saving = damage is None or all(is_finite(leaf) for _, leaf in trained)
        if worth_saving:
            self.saving.save_last_update()
        if damage is not None:
            saved = f" What was trained is in {parts.outputs.state.parent}." if worth_saving else ""
            raise UserError(f"iteration {at:,}: {what}: {damage}{saved}")
        cause = nonfinite.cause(parts.model, self.trained.loss, self._batches, self._watched, self.trained.passes)
        raise UserError(
            f"iteration {at:,}: {what}: {cause}. The update was not made; the state after iteration "
            f"{self.progress.iteration:,} is saved in {parts.outputs.state.parent}. Look at those lines, lower "
            "--learning-rate or set grad_clip, and start again (--resume-adapter-file continues from saved adapters)."
        )
