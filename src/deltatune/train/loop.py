"""Trains a model from its options: `Trainer` makes what a run is made of, and runs it (iterations.py)."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..data import Splits
from ..data.batches.peekable_order import PeekableOrder
from ..errors import UserError
from ..machine import backend
from ..ops.recomputation import Checkpoints
from ..options.config import TrainConfig
from .by_layer.layer_step import by_layers
from .by_layer.layer_weights import LayerWeights
from .check import check
from .distributed import World
from .ending.early_end import Ending
from .freed_memory import FreedMemory
from .iterations import Iterations, Parts
from .options_check import check_updates
from .preferences.reference import fill
from .reports import announce
from .reports.reporting import Reporting
from .reports.result import Result
from .reports.samples import Samples
from .reports.screen import Screen
from .saved import content, kept_choices, state
from .saved.folder import RunFolder
from .saved.outputs import Outputs
from .saved.saving import Saving
from .setup import Run, batch_order, training, training_order, with_iterations
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
        on_host = 0 if weights is None else weights.on_host
        self._reporting = Reporting(config, self.outputs, self.screen, self.world.main, on_host)
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
        from_run = run.loaded.model, run.loaded.tokenizer, run.config, run.splits
        more = {"model_config": run.loaded.config, "processor": run.loaded.processor}
        return cls(*from_run, world=run.world, screen=screen, folder=folder, weights=weights, **more)

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
            self.model.train()
            if backend.device() == "metal":
                mx.set_wired_limit(backend.gpu_memory())
            freed_memory = FreedMemory(config.clear_cache_threshold)
            iterations = Iterations(self._parts(), trained, passes, freed_memory)
            self._saving.begin(iterations.step)
            keep = fill(self.model, trained, self.splits, config, self._facts, world, self.screen)
            stack.callback(self._reporting.close)
            stack.enter_context(self._ending)
            stack.enter_context(freed_memory)
            self._open()
            self.progress.checkpoints = checkpoints
            world.do_on_main(keep, "keep the reference")
            self.screen.start(self.progress.iteration, config.iters)
            with self._ending.rescue():
                iterations.run()
        result = Result.of(self.progress, self._reporting.peak_memory, iterations.out_of_patience())
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

    def _parts(self) -> Parts:
        return Parts(
            model=self.model,
            config=self.config,
            world=self.world,
            screen=self.screen,
            outputs=self.outputs,
            order=self._order,
            valid_order=self._valid_order,
            optimizer=self._optimizer,
            samples=self._samples,
            saving=self._saving,
            reporting=self._reporting,
            ending=self._ending,
            weights=self._weights,
        )

    def _report_saved(self) -> None:
        """Write the report after a save; the progress may be that of the last update."""
        if not self.progress.finished:
            self._reporting.write(self.progress, "stopped" if self._ending.stop.asked else "still training")
