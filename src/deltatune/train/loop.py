"""Runs the training loop: iterations, evaluations, reports and saves.

Their order depends only on the saved state, so that a run that is killed anywhere continues to the same bits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..data import Batch, Splits
from ..data.batches.peekable_order import PeekableOrder
from ..errors import UserError
from ..machine import backend
from ..ops.recomputation import Checkpoints
from ..options.config import TrainConfig
from .by_layer.layer_passes import LayerPasses
from .by_layer.layer_step import by_layers, step_of
from .by_layer.layer_weights import LayerWeights
from .check import check
from .distributed import World
from .ending import nonfinite
from .ending.early_end import Ending
from .evaluate import Evaluation
from .freed_memory import FreedMemory
from .micro_batches import LONGEST, MicroBatches
from .options_check import check_updates
from .preferences.reference import fill
from .reports import announce
from .reports.reporting import Reporting
from .reports.result import Advance, Result
from .reports.samples import Samples
from .reports.screen import Screen
from .saved import content, kept_choices, state
from .saved.folder import RunFolder
from .saved.outputs import Outputs
from .saved.saving import Saving
from .setup import Run, Training, batch_order, build_step, training, training_order, with_iterations
from .step import LossFunction
from .updates.optimizer import build_optimizer


class Trainer:
    """Trains the trainable parameters of a model on `splits.train`; run() starts it.

    Files are written to `config.adapter_path`: adapters, or a checkpoint after full fine-tuning.

    Args:
        model: The model, with adapters (convert_to_lora) or unfrozen layers; its parameters change in place.
        tokenizer: The model's tokenizer, which is written with a checkpoint.
        config: The options of the run.
        splits: The training, validation and test examples.
        model_config: The content of the model's config.json; full fine-tuning needs it for the checkpoint.
        world: The ranks that train together; those of the launcher by default.
        screen: Where progress is printed; standard output by default.
        folder: The output folder, if the caller has taken it already.
        processor: mlx-vlm's processor of a model that is trained on images; sample_prompts need it.
        weights: What the layers' weights are read from, where `config.memory` bounds the run (plan/placement.py).

    Raises:
        UserError: For anything that the user can correct.

    Example:
        loaded = load(config.model)
        convert_to_lora(loaded.model, LoraConfig(rank=8, scale=2.0))
        splits = load_datasets(config, loaded.tokenizer)
        result = Trainer(loaded.model, loaded.tokenizer, config, splits).run()
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
        screen: Screen | None = None,
        folder: RunFolder | None = None,
        processor: Any = None,
        weights: LayerWeights | None = None,
    ):
        self.model, self.splits, self._weights = model, splits, weights
        self.world = world or World()
        check(model, tokenizer, config, splits)
        self._train_order = training_order(splits, config, self.world)
        self._order = PeekableOrder(self._train_order)
        self.config = config = with_iterations(config, self._train_order)
        if config.epochs is not None:
            check_updates(config)
        self.screen = screen or Screen(shown=self.world.main, plain=self.world.size > 1)
        self._samples = Samples(model, tokenizer, config, plain_text=splits.plain_text, processor=processor)
        self._folder = folder or RunFolder(config, self.world)
        self.outputs = Outputs(model, tokenizer, config, model_config)
        self._optimizer = build_optimizer(config)
        self._facts = content.facts(model, config, model_config, weights)
        identity = state.fingerprint(config, model=config.model, **self._facts)
        self._saving = Saving(model, self._optimizer, self._order, self.outputs, self.world, identity)
        self._reporting = Reporting(config, self.outputs, self.screen, self.world.main)
        self._saving.after = self._report_saved
        self._ending = Ending(self._saving, config, self.outputs, self.world, self.screen)
        self._valid_order = batch_order(splits.valid, config, self.world) if splits.valid else None

    @classmethod
    def of(
        cls,
        run: Run,
        screen: Screen | None = None,
        folder: RunFolder | None = None,
        weights: LayerWeights | None = None,
    ) -> Trainer:
        """Make the trainer of a loaded run (setup.ready), after Run.prepare() has made its model trainable."""
        given = run.loaded.model, run.loaded.tokenizer, run.config, run.splits
        more = {"model_config": run.loaded.config, "processor": run.loaded.processor}
        return cls(*given, world=run.world, screen=screen, folder=folder, weights=weights, **more)

    def run(self, *, checkpoints: Checkpoints | None = None) -> Result:
        """Train for `config.iters` iterations, or until the validation loss stops improving; return the final figures.

        Args:
            checkpoints: What is computed again where `config.grad_checkpoint` is auto (plan.fit.check).

        Raises:
            UserError: For anything that the user can correct, such as a loss that is not finite or a full disk.
            StoppedError: After Ctrl-C or SIGTERM, with the state saved.
        """
        config, world = self.config, self.world
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._folder)
            self._saving.chosen = stack.enter_context(kept_choices.kept(config))
            kept_choices.agree(self._saving.chosen, world)
            checkpoints = checkpoints if config.grad_checkpoint == "auto" else None
            trained = stack.enter_context(
                training(self.model, config, checkpoints=checkpoints, compare=self._weights is None)
            )
            trained, passes = stack.enter_context(by_layers(self.model, config, trained, self._weights))
            for fact in announce.facts(
                self.model, config, self.splits, trained, self._train_order, world, verbose=self.screen.verbose
            ):
                self.screen.say(fact)
            for line in announce.implementations(self._saving.chosen):
                self.screen.say(line)
            self.screen.panel("deltatune train")
            if self.outputs.note is not None:
                self.screen.say(self.outputs.note)
            self._reporting.about = announce.about(self.model, config, self.splits, trained)
            self._reporting.tables = announce.layer_table(trained)
            self._watched = [(f"{layer.path} ({layer.kind})", layer.module) for layer in trained.layers]
            self._prepare(trained, passes)
            keep = fill(self.model, trained, self.splits, config, self._facts, world, self.screen)
            stack.callback(self._reporting.close)
            stack.enter_context(self._ending)
            self._freed_memory = stack.enter_context(FreedMemory(config.clear_cache_threshold))
            self._open()
            self.progress.checkpoints = checkpoints
            world.do_on_main(keep, "keep the reference")
            self.screen.start(self.progress.iteration, config.iters)
            with self._ending.rescue():
                self._loop()
                self._save(finished=True)
        result = Result.of(self.progress, self._out_of_patience())
        self._reporting.write(self.progress, "ended", result)
        return result

    @property
    def about(self) -> dict[str, str]:
        """What the run is, by name, for its report; empty until run() is called."""
        return self._reporting.about

    @property
    def progress(self) -> state.Progress:
        """The progress of the run, as it is saved."""
        return self._saving.progress

    def _prepare(self, trained: Training, passes: LayerPasses | None) -> None:
        config, world, loss = self.config, self.world, trained.loss
        self.model.train()
        if backend.device() == "metal":
            mx.set_wired_limit(backend.gpu_memory())
        self._loss: LossFunction = loss
        self._step = build_step(self.model, self._optimizer, loss, config, world, step_of(passes))
        self._figures = trained.figures + self._step.reports
        by_pass = None if passes is None else passes.evaluate
        self._evaluation = Evaluation(self.model, loss, world, trained.figures, by_pass)
        self._saving.begin(self._step)
        given = self._step, self._saving, self._ending, self._order, config, world
        self._micro_batches = MicroBatches(self.model, self._optimizer, *given)
        self._batches: list[Batch] = []

    def _open(self) -> None:
        """Continue a saved run or start a new one, then open its metrics and services."""
        path, config, world = self.outputs.state, self.config, self.world
        has_state = state.exists(path)
        ranks_with_state = world.sum_numbers(float(has_state))[0]
        if config.resume and 0 < ranks_with_state < world.size:
            raise UserError(
                f"--resume: {path} must be on every machine, and some lack it; share the folder, or copy it to all."
            )
        if world.main:
            for line in self._folder.make_room():
                self.screen.say(line)
            self.outputs.prepare()
        if config.resume and has_state:
            for line in [*self._saving.restore(), *announce.resumed(self.progress, config, world)]:
                self.screen.say(line)
        elif config.resume:
            self.screen.say(announce.nothing_to_resume(config))
        self._reporting.open(self.progress)
        self._saving.metrics = self._reporting.metrics

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
            if not asked and self._samples.are_due(progress, last=done) and not self._sample():
                asked = True
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
                self._reporting.training(progress, self._optimizer.learning_rate.item(), self._figures)

    def _evaluation_is_due(self) -> bool:
        config, at = self.config, self.progress.iteration
        if self._valid_order is None or config.val_batches == 0 or self.progress.evaluated == at:
            return False
        return at == 0 or at % config.steps_per_eval == 0 or at >= config.iters

    def _evaluate(self) -> bool:
        """Evaluate and report; return False if interrupted, so that a resumed run starts with this evaluation."""
        assert self._valid_order is not None
        started, progress = time.perf_counter(), self.progress

        def between(done: int, total: int) -> bool:
            self._ending.check()
            self.screen.evaluating(done, total)
            return self._ending.stop.asked and self.world.size == 1

        loss = self._evaluation(self._valid_order, self.config.val_batches, between)
        if loss is None:
            return False
        if not math.isfinite(loss):
            self._on_every_rank(lambda: nonfinite.refuse_damaged(self.model))
        progress.evaluated = progress.iteration
        record = {"iteration": progress.iteration, "val_loss": loss, "val_time": time.perf_counter() - started}
        record |= {f"val_{name}": value for name, value in self._evaluation.figures.items()}
        progress.val_loss = loss
        # Without a target to count, the loss is NaN, which is no best.
        best = not math.isnan(loss) and (progress.best_loss is None or loss < progress.best_loss)
        self._reporting.validation(progress, record, best=best)
        if best:
            progress.best_loss, progress.evaluations_without_gain = loss, 0
            progress.best_iteration = progress.iteration
            # Before the first iteration nothing is trained: the model as it came is not worth a copy.
            if progress.iteration:
                self._on_every_rank(lambda: self._saving.save_best(loss))
        else:
            progress.evaluations_without_gain += 1
        if self._out_of_patience():
            self.screen.say(
                f"Stopping early after iteration {progress.iteration}: {progress.evaluations_without_gain} evaluations "
                f"without a loss below {progress.best_loss:.4f}."
            )
        return True

    def _sample(self) -> bool:
        """Answer the prompts and report it; return False if interrupted, so that a resumed run starts with this."""
        answers = self._samples.on_main(self.world, self._ending)
        if answers is None:
            return False
        self.progress.sampled = self.progress.iteration
        if self.world.main:
            self._reporting.samples(self.progress, answers)
        return True

    def _out_of_patience(self) -> bool:
        patience = self.config.early_stopping
        return patience is not None and self.progress.evaluations_without_gain >= patience

    def _iterate(self) -> bool:
        """Run a micro-batch, and the update if it is due; return whether any rank was asked to stop."""
        progress, started = self.progress, time.perf_counter()
        if progress.micro_batches == 0:
            self._batches = []
        self._saving.note_start()
        batch = self._next_batch()
        self._batches.append(batch)
        (loss_sum, weight_sum, all_tokens, asked, *reported), norm = self._advance(batch)
        progress.iteration += 1
        if not math.isfinite(loss_sum) or (norm is not None and not math.isfinite(norm)):
            self._fail(loss_sum, norm)
        if norm is not None:
            progress.grad_norm = norm
            self._saving.start_window()
        progress.add(loss_sum, weight_sum, all_tokens, reported)
        self._freed_memory.after_iteration()
        seconds = time.perf_counter() - started
        progress.seconds += seconds
        loss = loss_sum / weight_sum if weight_sum else None
        self._reporting.iteration(progress, seconds, int(all_tokens), loss)
        return asked > 0

    def _next_batch(self) -> Batch:
        """Return the next batch; if a stream has a row that cannot be trained on, the state is saved first."""
        try:
            return next(self._order)
        except UserError as error:
            self._ending.in_order()
            self._saving.save_last_update()
            raise UserError(
                f"{error} The state after iteration {self.progress.iteration} is saved in {self.outputs.state.parent}; "
                "mend the data and give --resume."
            ) from error

    def _advance(self, batch: Batch) -> Advance:
        """Compute the gradients of `batch`, and make the update if it is due; return the sums over all ranks."""
        return self._micro_batches.advance(batch, self._goes_on())

    def _goes_on(self) -> bool:
        """Whether the next iteration follows the present one directly, and is short enough to be started early."""
        config, at = self.config, self.progress.iteration + 1
        if at >= config.iters or self._ending.stop.asked or self._reporting.last_seconds > LONGEST:
            return False
        due = [config.save_every]
        if self._valid_order is not None and config.val_batches:
            due.append(config.steps_per_eval)
        if self._samples.prompts:
            due.append(config.steps_per_sample or config.steps_per_eval)
        return all(at % each for each in due)

    def _save(self, finished: bool = False) -> None:
        self._on_every_rank(lambda: self._saving.save(finished))

    def _report_saved(self) -> None:
        """Write the report after a save; the progress may be that of the last update."""
        if not self.progress.finished:
            self._reporting.write(self.progress, "stopped" if self._ending.stop.asked else "still training")

    def _on_every_rank(self, action: Callable[[], None]) -> None:
        """Do what raises a UserError on every rank if it raises one on any."""
        try:
            action()
        except UserError:
            self._ending.in_order()
            raise

    def _fail(self, loss: float, norm: float | None) -> None:
        """Raise for a loss or gradient that is not finite, after saving the last good state and finding the cause."""
        at, batches = self.progress.iteration, self._batches
        self.screen.stop()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        self._ending.in_order()
        # An update that is not finite changes no parameter.
        self._saving.updating = False
        damage = nonfinite.damage(self.model, self._weights)
        worth_saving = damage is None or nonfinite.trained_is_finite(self.model)
        if worth_saving:
            self._saving.save_last_update()
        if damage is not None:
            kept = f" What was trained is in {self.outputs.state.parent}." if worth_saving else ""
            raise UserError(f"iteration {at}: {what}: {damage}{kept}")
        if self._weights is None:
            cause = nonfinite.cause(self.model, self._loss, batches, self._watched)
        else:
            cause = "where is not looked for with --memory"
        kept = f"the state after iteration {self.progress.iteration} is saved in {self.outputs.state.parent}"
        raise nonfinite.refusal(f"iteration {at}: {what}: {cause}", kept)
