"""The training loop: iterations, evaluations, reports and saves, in an order that a kill anywhere cannot change."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config import TrainConfig
from ..data import Batch, Splits
from ..errors import UserError
from ..machine import backend, blas
from . import announce, content, log, nonfinite, state
from .check import check
from .distributed import World
from .ending import Ending
from .evaluate import Evaluation
from .optimizer import build_optimizer
from .outputs import Outputs
from .report import write_report
from .result import Result
from .saving import Saving
from .setup import Run, batch_order, build_step, training
from .step import LossFunction, Sums
from .tree import number, seed_iteration


class Advance(NamedTuple):
    """What an iteration gave.

    Attributes:
        sums: Over all ranks: losses, weights of targets, positions that hold a token, ranks that were asked to stop.
        norm: The gradients' Euclidean norm before clipping, or None where no update was completed.
    """

    sums: tuple[float, float, float, float]
    norm: float | None


class Trainer:
    """Trains what is trainable in `model` on `splits.train`, as `config` says; run() does it.

    model: converted (convert_to_lora) or unfrozen; its parameters change in place. Files go to `config.adapter_path`;
    a fully fine-tuned model is written as a checkpoint, with `tokenizer` and `model_config`, its config.json.
    UserError for anything the user can mend; StoppedError after Ctrl-C, with the state saved.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: TrainConfig,
        splits: Splits,
        *,
        model_config: dict[str, Any] | None = None,
        world: World | None = None,
        screen: log.Screen | None = None,
    ):
        self.model, self.config, self.splits = model, config, splits
        self.world = world or World()
        self.screen = screen or log.Screen(shown=self.world.main)
        self.outputs = Outputs(model, tokenizer, config, model_config)
        check(model, config, splits)
        self._optimizer = build_optimizer(config)
        self._train_order = batch_order(splits.train, config, self.world)
        identity = state.fingerprint(config, **content.facts(model, config))
        self._saving = Saving(model, self._optimizer, self._train_order, self.outputs, self.world, identity)
        self._ending = Ending(self._saving, config, self.outputs, self.world, self.screen)
        self._valid_order = batch_order(splits.valid, config, self.world) if splits.valid else None

    @classmethod
    def of(cls, run: Run, screen: log.Screen | None = None) -> Trainer:
        """The trainer of a run that is ready (setup.ready, then Run.prepare)."""
        loaded = run.loaded
        return cls(
            loaded.model,
            loaded.tokenizer,
            run.config,
            run.splits,
            model_config=loaded.config,
            world=run.world,
            screen=screen,
        )

    def run(self) -> Result:
        """Train to `config.iters`, or until validation stops improving; returns the final figures."""
        config, world = self.config, self.world
        with contextlib.ExitStack() as stack:
            trained = stack.enter_context(training(self.model, config))
            for line in announce.lines(self.model, config, self.splits, trained, self._train_order, world):
                self.screen.say(line)
            self._watched = [(f"{layer.path} ({layer.kind})", layer.module) for layer in trained.layers]
            self._prepare(trained.loss)
            stack.callback(self._close)
            stack.enter_context(self._ending)
            self._open()
            self.screen.start(self.progress.iteration, config.iters)
            with self._ending.rescue():
                self._loop()
                self._save(finished=True)
        result = Result.of(self.progress, self._out_of_patience())
        if world.main:
            write_report(self.outputs.report, self.outputs.metrics, config, dataclasses.asdict(result))
        return result

    @property
    def progress(self) -> state.Progress:
        """Where the run stands."""
        return self._saving.progress

    def _prepare(self, loss: LossFunction) -> None:
        config, world = self.config, self.world
        self.model.train()
        if mx.metal.is_available():
            mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        threshold = config.clear_cache_threshold
        self._cache_limit = backend.cache_to_keep() if threshold is None else threshold
        self._loss = loss
        self._step = build_step(self.model, self._optimizer, loss, config, world)
        self._evaluation = Evaluation(self.model, loss, world)
        self._saving.begin(self._step)
        self._batches: list[Batch] = []
        self._window: deque[tuple[float, int]] = deque()
        self._recent: deque[float] = deque(maxlen=50)

    def _open(self) -> None:
        """Continue a saved run, or start one; then open the metrics where it stands."""
        path, config, world = self.outputs.state, self.config, self.world
        found = path.is_file()
        everywhere = world.sum_numbers(float(found))[0]
        if config.resume and 0 < everywhere < world.size:
            raise UserError(f"--resume: {path} is not on every machine; share the folder, or copy it to all of them.")
        if world.main:
            self.outputs.prepare()
        if config.resume and found:
            if self._saving.restore():
                self.screen.say(f"BLAS: {blas.status().threads}.")
            self.screen.say(f"Resuming after iteration {self.progress.iteration} of {config.iters}.")
            ranks = self.progress.ranks
            if ranks not in (None, world.size):
                self.screen.say(
                    f"Ranks: {world.size}, where {ranks} saved the state. The batches stay the same; sums are rounded "
                    "in another order, and dropout draws other numbers."
                )
        elif config.resume:
            self.screen.say(f"--resume: no state in {path.parent} yet; starting from the first iteration.")
        elif found and (before := state.peek(path)) and not before.finished:
            self.screen.say(
                f"{path.parent} holds a run stopped after iteration {before.iteration}; this run will replace it "
                "at its first save. Stop and use --resume to continue that one."
            )
        metrics = log.Metrics(self.outputs.metrics, self.progress.metrics_bytes) if world.main else None
        self._metrics = self._saving.metrics = metrics
        options = dataclasses.asdict(config)
        self._services = (
            log.open_services(config.report_to, self.outputs.directory, config.project_name, options)
            if world.main
            else []
        )

    def _close(self) -> None:
        self.screen.stop()
        for service in getattr(self, "_services", []):
            service.close()
        metrics = getattr(self, "_metrics", None)
        if metrics is not None:
            metrics.close()

    def _loop(self) -> None:
        config, stop = self.config, self._ending.stop
        asked = False
        while True:
            self._ending.check()
            progress = self.progress
            asked = asked or (stop.asked and self.world.size == 1)
            if not asked and self._evaluation_is_due() and not self._evaluate():
                asked = True
            done = progress.iteration >= config.iters or self._out_of_patience()
            if asked and not done:
                self._save()
                self._ending.in_order()
                raise self._ending.stopped()
            if done:
                return
            saved = self._saving.saved
            if progress.iteration and progress.iteration % config.save_every == 0 and saved != progress.iteration:
                self._save()
            asked = self._iterate()
            if progress.iteration % config.steps_per_report == 0 or progress.iteration >= config.iters:
                self._report_training()

    def _evaluation_is_due(self) -> bool:
        config, at = self.config, self.progress.iteration
        if self._valid_order is None or config.val_batches == 0 or self.progress.evaluated == at:
            return False
        return at == 0 or at % config.steps_per_eval == 0 or at >= config.iters

    def _evaluate(self) -> bool:
        """Evaluate and report; False when interrupted, so that a resumed run evaluates here first."""
        assert self._valid_order is not None
        started, progress = time.perf_counter(), self.progress

        def between(done: int, total: int) -> bool:
            self._ending.check()
            self.screen.evaluating(done, total)
            return self._ending.stop.asked and self.world.size == 1

        loss = self._evaluation(self._valid_order, self.config.val_batches, between)
        if loss is None:
            return False
        progress.evaluated = progress.iteration
        record = {"iteration": progress.iteration, "val_loss": loss, "val_time": time.perf_counter() - started}
        progress.val_loss = loss
        self._report(record, log.validation_line(record))
        if progress.best_loss is None or loss < progress.best_loss:
            progress.best_loss, progress.evaluations_without_gain = loss, 0
        else:
            progress.evaluations_without_gain += 1
        if self._out_of_patience():
            self.screen.say(
                f"Stopping early after iteration {progress.iteration}: {progress.evaluations_without_gain} evaluations "
                f"without a loss below {progress.best_loss:.4f}."
            )
        return True

    def _out_of_patience(self) -> bool:
        patience = self.config.early_stopping
        return patience is not None and self.progress.evaluations_without_gain >= patience

    def _iterate(self) -> bool:
        """One micro-batch, and the update if it completes one; returns whether any rank was asked to stop."""
        progress, started = self.progress, time.perf_counter()
        if progress.micro_batches == 0:
            self._batches = []
        self._saving.note_start()
        batch = next(self._train_order)
        self._batches.append(batch)
        seed_iteration(self.config.seed, progress.iteration, self.world.rank)
        (loss_sum, weight_sum, all_tokens, asked), norm = self._advance(batch)
        progress.iteration += 1
        if not math.isfinite(loss_sum) or (norm is not None and not math.isfinite(norm)):
            self._fail(loss_sum, norm)
        if norm is not None:
            progress.grad_norm = norm
            self._saving.start_window()
        progress.window_loss += loss_sum
        progress.window_weight += weight_sum
        progress.trained_tokens += all_tokens
        if mx.get_cache_memory() > self._cache_limit:
            mx.clear_cache()
        seconds = time.perf_counter() - started
        progress.seconds += seconds
        self._window.append((seconds, int(all_tokens)))
        self._recent.append(seconds)
        self.screen.advance(progress.iteration, f"loss {loss_sum / weight_sum:.4f}" if weight_sum else "")
        return asked > 0

    def _advance(self, batch: Batch) -> Advance:
        """Run the batch, and the update if it completes one; returns what all ranks know afterwards."""
        progress, world, saving = self.progress, self.world, self._saving
        loss, weight, gradients = self._step.micro_batch(batch, saving.sums.gradients)
        sums = Sums(gradients, saving.sums.loss + loss, saving.sums.weight + weight)
        completes = progress.micro_batches + 1 >= self.config.grad_accumulation_steps
        saving.sums = self._step.sum_over_ranks(sums) if completes else sums
        del gradients, sums
        # Before the update: what fails, for want of memory above all, fails while the parameters are still whole.
        with self._ending.waiting():
            mx.eval(loss, weight, saving.sums)
        progress.micro_batches += 1
        norm = None
        if completes:
            saving.updating = True
            norm = self._step.update(*saving.sums)
            # Only what is kept is referred to while it is evaluated, so that buffers are reused.
            saving.sums = saving.sums._replace(gradients=None)
        tokens = sum(sum(row) for row in batch.positions)
        asked = mx.array([tokens, self._ending.stop.asked], mx.float32)
        # One message with the update, instead of a round trip of its own for each number.
        numbers = world.sum(mx.concatenate([mx.stack([loss, weight]), asked]))
        mx.eval(self.model.trainable_parameters(), self._optimizer.state, norm, numbers)
        values: Any = numbers.tolist()
        return Advance(tuple(values), None if norm is None else number(norm))

    def _report_training(self) -> None:
        progress = self.progress
        seconds = sum(s for s, _ in self._window) or 1e-9
        loss = progress.window_loss / progress.window_weight if progress.window_weight else math.nan
        record = {
            "iteration": progress.iteration,
            "train_loss": loss,
            "grad_norm": progress.grad_norm,
            "learning_rate": self._optimizer.learning_rate.item(),
            "iterations_per_second": len(self._window) / seconds,
            "tokens_per_second": sum(t for _, t in self._window) / seconds,
            "trained_tokens": int(progress.trained_tokens),
            "peak_memory": mx.get_peak_memory() / 1e9,
        }
        left = sum(self._recent) / len(self._recent) * (self.config.iters - progress.iteration)
        progress.window_loss = progress.window_weight = 0.0
        self._window.clear()
        progress.train_loss = loss
        self._report(record, log.train_line(record, self.config.iters, left))

    def _report(self, record: dict[str, Any], line: str) -> None:
        self.screen.say(line)
        if self._metrics is not None:
            self.progress.metrics_bytes = self._metrics.write(record)
        numbers = {k: v for k, v in record.items() if k != "iteration" and v is not None}
        for service in self._services:
            service.log(numbers, record["iteration"])

    def _save(self, finished: bool = False) -> None:
        try:
            self._saving.save(finished)
        except UserError:
            # Every rank raises where rank 0 could not write.
            self._ending.in_order()
            raise

    def _fail(self, loss: float, norm: float | None) -> None:
        """Name the cause of a loss or gradient that is not finite, go back to the last good state, save it, raise."""
        at, batches = self.progress.iteration, self._batches
        self.screen.stop()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        self._ending.in_order()
        # An update that is not finite moves nothing.
        self._saving.updating = False
        self._saving.save_last_update()
        cause = nonfinite.cause(self.model, self._loss, batches, self._watched)
        raise UserError(
            f"iteration {at}: {what}: {cause}. The update was not made; the state after iteration "
            f"{self.progress.iteration} is saved in {self.outputs.state.parent}. Look at those lines, lower "
            "--learning-rate or set grad_clip, and start again (--resume-adapter-file continues from saved adapters)."
        )
