"""The training loop: iterations, evaluations, reports and saves, in an order that a kill anywhere cannot change."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import TrainConfig
from ..data import Batch, Splits
from ..errors import UserError
from ..machine import backend, blas
from ..ops.random_state import get_key, set_key
from . import announce, log, nonfinite, state
from .check import check
from .distributed import World
from .evaluate import Evaluation
from .interrupt import StoppedError, StopRequest
from .optimizer import build_optimizer, restore
from .outputs import Outputs
from .report import write_report
from .result import Result
from .setup import Run, batch_order, build_step, training
from .step import LossFunction, Sums
from .tree import number


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
        self.progress, self._saved = state.Progress(), -1
        check(model, config, splits)
        self._optimizer = build_optimizer(config)
        self._identity = state.fingerprint(config, world=self.world.size, model_tensors=announce.structure(model))
        self._train_order = batch_order(splits.train, config, self.world)
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
            stop = stack.enter_context(StopRequest())
            stack.callback(self._close)
            self._open()
            self.screen.start(self.progress.iteration, config.iters)
            stack.push(self._rescue)
            self._loop(stop)
            self._save(finished=True)
        result = Result.of(self.progress, self._out_of_patience())
        if world.main:
            write_report(self.outputs.report, self.outputs.metrics, config, dataclasses.asdict(result))
        return result

    def _prepare(self, loss: LossFunction) -> None:
        config, world = self.config, self.world
        self.model.train()
        if mx.metal.is_available():
            mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        if world.size > 1:
            # Dropout differs between ranks; the parameters were drawn before, from the same key.
            set_key(mx.random.split(get_key(), world.size)[world.rank])
        threshold = config.clear_cache_threshold
        self._cache_limit = backend.cache_to_keep() if threshold is None else threshold
        self._loss = loss
        self._step = build_step(self.model, self._optimizer, loss, config, world)
        self._evaluation = Evaluation(self.model, loss, world)
        # What a window began with, while no update has ended it: progress, random key, sums (None: nothing yet).
        self._good: tuple[state.Progress, mx.array, Sums | None] | None = None
        self._start_window()
        self._window: deque[tuple[float, int]] = deque()
        self._recent: deque[float] = deque(maxlen=50)

    def _start_window(self) -> None:
        self._sums = Sums(self._step.zeros(), mx.array(0.0), mx.array(0.0))
        self._batches: list[Batch] = []
        self.progress.micro_batches = 0

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
            self._restore(path)
            self.screen.say(f"Resuming after iteration {self.progress.iteration} of {config.iters}.")
        elif config.resume:
            self.screen.say(f"--resume: no state in {path.parent} yet; starting from the first iteration.")
        elif found and (before := state.peek(path)) and not before.finished:
            self.screen.say(
                f"{path.parent} holds a run stopped after iteration {before.iteration}; this run will replace it "
                "at its first save. Stop and use --resume to continue that one."
            )
        self._metrics = log.Metrics(self.outputs.metrics, self.progress.metrics_bytes) if world.main else None
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

    def _loop(self, stop: StopRequest) -> None:
        config, progress = self.config, self.progress
        asked = False
        while True:
            asked = asked or (stop.asked and self.world.size == 1)
            if not asked and self._evaluation_is_due() and not self._evaluate(stop):
                asked = True
            done = progress.iteration >= config.iters or self._out_of_patience()
            if asked and not done:
                self._save()
                raise StoppedError(
                    f"stopped after iteration {progress.iteration} of {config.iters}; the state is saved in "
                    f"{self.outputs.state.parent}. Run the same command with --resume to continue."
                )
            if done:
                return
            if progress.iteration and progress.iteration % config.save_every == 0 and self._saved != progress.iteration:
                self._save()
            asked = self._iterate(stop)
            if progress.iteration % config.steps_per_report == 0 or progress.iteration >= config.iters:
                self._report_training()

    def _evaluation_is_due(self) -> bool:
        config, at = self.config, self.progress.iteration
        if self._valid_order is None or config.val_batches == 0 or self.progress.evaluated == at:
            return False
        return at == 0 or at % config.steps_per_eval == 0 or at >= config.iters

    def _evaluate(self, stop: StopRequest) -> bool:
        """Evaluate and report; False when interrupted, so that a resumed run evaluates here first."""
        assert self._valid_order is not None
        started, progress = time.perf_counter(), self.progress

        def between(done: int, total: int) -> bool:
            self.screen.evaluating(done, total)
            return stop.asked and self.world.size == 1

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

    def _iterate(self, stop: StopRequest) -> bool:
        """One micro-batch, and the update if it completes one; returns whether any rank was asked to stop."""
        progress, started = self.progress, time.perf_counter()
        if progress.micro_batches == 0:
            self._good = (dataclasses.replace(progress, order=self._train_order.state()), get_key(), None)
        batch = next(self._train_order)
        self._batches.append(batch)
        loss, weight, norm = self._advance(batch)
        progress.iteration += 1
        tokens = sum(sum(row) for row in batch.positions)
        loss_sum, weight_sum, all_tokens, asked = self.world.sum_numbers(loss, weight, tokens, float(stop.asked))
        if not math.isfinite(loss_sum) or (norm is not None and not math.isfinite(norm)):
            self._fail(loss_sum, norm)
        if norm is not None:
            progress.grad_norm = norm
            self._start_window()
            self._good = None
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

    def _advance(self, batch: Batch) -> tuple[float, float, float | None]:
        """Run the batch: sums of its losses and weights, and the gradient norm if it completed an update."""
        progress = self.progress
        loss, weight, gradients = self._step.micro_batch(batch, self._sums.gradients)
        self._sums = Sums(gradients, self._sums.loss + loss, self._sums.weight + weight)
        del gradients
        # Before the update: what fails, for want of memory above all, fails while the parameters are still whole.
        mx.eval(loss, weight, self._sums)
        progress.micro_batches += 1
        norm = None
        if progress.micro_batches >= self.config.grad_accumulation_steps:
            norm = self._step.update(*self._sums)
            # Only what is kept is referred to while it is evaluated, so that buffers are reused.
            self._sums = self._sums._replace(gradients=None)
        mx.eval(self.model.trainable_parameters(), self._optimizer.state, norm, get_key())
        return number(loss), number(weight), None if norm is None else number(norm)

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
        """Write weights, then the state; every rank takes part, rank 0 writes. UserError where it cannot."""
        progress, world = self.progress, self.world
        progress.finished = finished
        progress.order = self._train_order.state()
        threads = blas.status().threads
        progress.blas_threads = threads.number if threads else 0
        arrays = state.pack("trainable", self.model.trainable_parameters())
        bundles = self._step.bundles
        arrays |= state.pack("optimizer", bundles.part_state(self._optimizer.state))
        arrays["random"] = world.gather(get_key())
        if progress.micro_batches:
            sums = state.pack("window", self._parted(self._sums)._asdict())
            arrays |= {key: world.gather(leaf) for key, leaf in sums.items()}
        problem: UserError | None = None
        if world.main:
            try:
                self.outputs.save_weights(progress.iteration)
                assert self._metrics is not None
                self._metrics.sync()
                state.save(self.outputs.state, arrays, progress, self._identity)
            except UserError as error:
                problem = error
        if world.sum_numbers(float(problem is not None))[0]:
            raise problem or UserError("rank 0 could not save; its message says why.")
        self._saved = progress.iteration

    def _restore(self, path: Path) -> None:
        arrays, progress = state.load(path, self._identity)
        if progress.blas_threads and blas.use_threads(progress.blas_threads, "as in the run that goes on here"):
            self.screen.say(f"BLAS: {blas.status().threads}.")
        self.model.update(state.unpack("trainable", self.model.trainable_parameters(), arrays, path))
        bundles, moments = self._step.bundles, self._optimizer.state
        parted = state.unpack("optimizer", bundles.part_state(moments), arrays, path)
        restore(self._optimizer, bundles.join_state(parted, moments))
        self._train_order.restore(progress.order)
        rank = self.world.rank
        set_key(arrays["random"][rank])
        self.progress, self._saved = progress, progress.iteration
        if progress.micro_batches:
            mine = {key: leaf[rank] for key, leaf in arrays.items() if key.startswith("window/")}
            sums = Sums(**state.unpack("window", self._parted(self._sums)._asdict(), mine, path))
            self._sums = sums if sums.gradients is None else sums._replace(gradients=bundles.join(sums.gradients))
            self._good = (dataclasses.replace(progress), get_key(), self._sums)
        mx.eval(self.model.parameters(), self._optimizer.state, self._sums)

    def _parted(self, sums: Sums) -> Sums:
        """With gradients by the path of their parameter, as a run keeps them."""
        return sums if sums.gradients is None else sums._replace(gradients=self._step.bundles.part(sums.gradients))

    def _back_to_last_update(self) -> None:
        """Put everything where the last update left it, and save that. Nothing has moved a parameter since."""
        if self._good is not None:
            self.progress, key, sums = self._good
            inside = self.progress.micro_batches
            self._start_window()
            if sums is not None:
                self._sums, self.progress.micro_batches = sums, inside
            self._train_order.restore(self.progress.order)
            set_key(key)
            if self._metrics is not None:
                self._metrics.cut(self.progress.metrics_bytes)
        self._save()

    def _rescue(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Save on the way out of an error that is nobody's mistake. With several ranks the last save must do."""
        if not isinstance(error, Exception) or isinstance(error, UserError) or self.world.size > 1:
            return
        try:
            self._back_to_last_update()
        except (UserError, RuntimeError) as second:
            error.add_note(f"Nor could the state be saved: {second}")
        else:
            error.add_note(
                f"The state after iteration {self.progress.iteration} is saved in {self.outputs.state.parent}: "
                "go on with --resume."
            )

    def _fail(self, loss: float, norm: float | None) -> None:
        """Name the cause of a loss or gradient that is not finite, go back to the last good state, save it, raise."""
        at, batches = self.progress.iteration, self._batches
        self.screen.stop()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        self._back_to_last_update()
        cause = nonfinite.cause(self.model, self._loss, batches, self._watched)
        raise UserError(
            f"iteration {at}: {what}: {cause}. The update was not made; the state after iteration "
            f"{self.progress.iteration} is saved in {self.outputs.state.parent}. Look at those lines, lower "
            "--learning-rate or set grad_clip, and start again (--resume-adapter-file continues from saved adapters)."
        )
