"""Trains a model from its options: `Trainer` makes the parts of a run, and runs it (iterations.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..data import Splits
from ..data.batches.order import PeekableOrder, TrainingOrder
from ..data.chats.answers import ending_answers
from ..data.example import Example
from ..data.preferences.preference import Preference
from ..data.prompts import PromptExample
from ..errors import UserError
from ..lora import load_adapter_weights
from ..machine import backend
from ..machine.awake import awake
from ..models.batch_decoder import has_row_caches
from ..models.load import Loaded
from ..models.vision.split import CACHE_BYTES, has_vision
from ..models.vocabulary import check_examples, lacks_rows
from ..ops.operator.rankings import Rankings
from ..ops.recomputation import Checkpoints
from ..options.conditions import TRAINING, Facts, changed_options, refuse_unread
from ..options.config import TrainConfig
from ..rewards import Rewards
from .by_layer.layer_step import by_layers, step_of, streamed_teacher
from .by_layer.store import Store
from .distributed import World
from .ending.early_end import Ending
from .engine import EarlyEngine, Engine, starts_early
from .evaluation.evaluate import say_loss
from .evaluation.reference import fill
from .evaluation.samples import Samples
from .freed_memory import FreedMemory
from .iterations import Callbacks, Iterations, Parts
from .launcher import Launcher
from .options_check import check_positions, check_trainable, check_updates
from .progress import Progress, Result
from .reports import announce
from .reports.announce import trainable_count
from .reports.reporting import Reporting
from .reports.screen import Fact, Screen
from .rollouts.answer_sampler import check_covered
from .rollouts.sampled_run import sampled_order, say_reward
from .saved import state
from .saved.folder import RunFolder
from .saved.outputs import Outputs
from .saving import Saving, agree_on_choices, kept_choices
from .setup import Run, Training, batch_order, build_step, settled, training, training_order
from .step import StepMachine
from .training_state import TrainingState
from .updates.optimizer import build_optimizer
from .updates.routers import router_figures


@dataclass(frozen=True)
class Bounds:
    """The decisions of a plan, with which a run stays within the memory of the device, or within `config.memory`."""

    # Lines for the user: the plan, or why there is none on this version of MLX.
    said: Sequence[Fact | str] = ()
    # The layers to recompute where `config.grad_checkpoint` is auto; None elsewhere.
    checkpoints: Checkpoints | None = None
    # The bytes from which on MLX waits for queued work; None for its own limit.
    memory_limit: int | None = None
    # The main memory of cached features of images; None for none where layers stay on the disk, and 1 GiB elsewhere.
    feature_bytes: int | None = None
    # The store of the layers' weights; None where all of them stay in memory.
    weights: Store | None = None
    # The store of the weights of a teacher's layers, likewise.
    teacher: Store | None = None


class Trainer:
    """Trains the trainable parameters of a model on `splits.train`; run() starts it.

    Files are written to `config.adapter_path`: adapters, or a checkpoint after full fine-tuning. The options are
    followed as `deltatune train` follows them; `memory` and `grad_checkpoint` auto need a plan, as PlannedRun makes it.

    Args:
        model: The model, with adapters (convert_to_lora) or unfrozen layers, as the options name them; its parameters
            change in place.
        tokenizer: The model's tokenizer, which is written with a checkpoint.
        config: The options of the run.
        splits: The training, validation and test examples.
        model_config: The content of the model's config.json; full fine-tuning needs it for the checkpoint.
        world: The ranks that train together; those of the launcher by default.
        screen: Where progress is printed; standard output by default.
        folder: The output folder, if the caller has taken it already.
        processor: mlx-vlm's processor of a model that is trained on images; sample_prompts need it.
        bounds: The plan of the run, with which `config.memory` or `grad_checkpoint` auto is followed.
        rewards: The reward functions of a run that samples its answers.
        callbacks: Functions that the run calls.

    Attributes:
        model, splits: The arguments.
        config: The options of the run, with the number of iterations that `epochs` stands for.
        outputs: The files of the run.
        parts: The parts of the run before its model is patched.
        progress: The progress of the run, as it is saved.

    Raises:
        UserError: For anything that the user can correct.

    Example:
        loaded = load(config.model)
        convert_to_lora(loaded.model, config.lora_parameters)
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
        bounds: Bounds | None = None,
        rewards: Rewards | None = None,
        callbacks: Callbacks | None = None,
    ):
        self._bounds = bounds or Bounds()
        weights = self._bounds.weights
        world = world or World()
        _check(model, tokenizer, config, splits, bounds=bounds, rewards=rewards)
        if config.resume_adapter_file is not None:
            # A continued run takes its adapters from its state, whatever it began with.
            load_adapter_weights(model, config.resume_adapter_file, compare=not config.resume)
        check = partial(_check_examples, model, tokenizer, config)
        self.splits = splits
        self._train_order = training_order(splits, config, world, check)
        config = settled(config, splits, self._train_order)
        if config.epochs is not None:
            check_updates(config)
        screen = screen or Screen(shown=world.main, plain=world.size > 1)
        self._loaded = Loaded(model, tokenizer, {}, Path(config.model or ""), processor)
        samples = Samples(self._loaded, config, plain_text=splits.plain_text, weights=weights)
        thumbnails = [prompt.thumbnails for prompt in samples.prompts]
        on_host = 0 if weights is None else weights.on_host
        self._folder = folder or RunFolder(config, world)
        outputs = Outputs(model, tokenizer, config, model_config)
        self._facts = state.digests(model, config, model_config, weights, self._bounds.teacher)
        self._identity = state.fingerprint(config, model=config.model, **self._facts)
        self.model = model
        self.config = config
        self.outputs = outputs
        self.progress = Progress()
        self._optimizer = build_optimizer(config)
        self._rewards = rewards
        self.parts = Parts(
            model=model,
            config=config,
            world=world,
            screen=screen,
            outputs=outputs,
            valid_order=batch_order(splits.valid, config, world) if splits.valid else None,
            samples=samples,
            reporting=Reporting(config, outputs, screen, world.main, on_host, thumbnails),
            weights=weights,
            callbacks=callbacks or Callbacks(),
        )

    @classmethod
    def of(cls, run: Run, screen: Screen | None = None, **more: Any) -> Trainer:
        """Make the trainer of a loaded run (setup.ready), after Run.prepare() has made its model trainable.

        `more` are further arguments of Trainer.
        """
        from_run = run.loaded.model, run.loaded.tokenizer, run.config, run.splits
        more |= {"model_config": run.loaded.config, "processor": run.loaded.processor, "world": run.world}
        return cls(*from_run, screen=screen, **more)

    def run(self) -> Result:
        """Train for `config.iters` iterations, or until the validation loss stops improving; return the final figures.

        Raises:
            UserError: For anything that the user can correct, such as a loss that is not finite or a full disk.
            StoppedError: After Ctrl-C or SIGTERM, with the state saved.
        """
        weights = self.parts.weights or self._bounds.teacher
        with contextlib.nullcontext() if weights is None else contextlib.closing(weights):
            result = self._trained()
            if weights is not None:
                self.parts.screen.say(weights.disk.said(result.seconds))
            if self.config.test:
                self._say_test()
        return result

    def _say_test(self) -> None:
        """Print the loss on the test set, or the reward where the run samples its answers."""
        parts = self.parts
        if self._rewards is not None:
            model = self._answering
            say_reward("Test", model, self.config, self.splits.test, self._rewards, parts.world, parts.screen)
            return
        say_loss("Test", self.model, self.config, self.splits.test, parts.world, parts.screen, parts.weights)

    def _trained(self) -> Result:
        parts = self.parts
        config = self.config
        model = self.model
        progress = self.progress
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._folder)
            stack.enter_context(awake())
            chosen = stack.enter_context(kept_choices(config))
            agree_on_choices(chosen, parts.world)
            checkpoints = self._bounds.checkpoints
            whole = parts.weights is None
            trained = stack.enter_context(training(model, config, checkpoints=checkpoints, compare=whole))
            ending = Ending(config, parts.outputs, parts.world, parts.screen)
            feature_bytes = self._bounds.feature_bytes
            if feature_bytes is None:
                feature_bytes = CACHE_BYTES if whole else 0
            layers = by_layers(model, config, trained, parts.weights, ending.between_layers, feature_bytes)
            trained = stack.enter_context(layers)
            trained = stack.enter_context(streamed_teacher(trained, self._bounds.teacher))
            order = self._order(trained, ending)
            trained = dataclasses.replace(trained, figures=trained.figures + order.figures)
            self._announce(trained, chosen)
            model.train()
            # An Apple GPU keeps its memory wired. That of an NVIDIA GPU is its own, and MLX sets no limit there.
            if size := backend.gpu_memory():
                stack.callback(mx.set_wired_limit, mx.set_wired_limit(size))
            freed_memory = FreedMemory(self._bounds.memory_limit)
            # A step by layers is computed when it returns, batches of sampled answers depend on the update before, and
            # a teacher's layers are read before a batch.
            waits = not whole or config.samples_answers or self._bounds.teacher is not None
            early = not waits and starts_early(model, config, parts.world)
            launcher = stack.enter_context(Launcher()) if early else None
            kind = step_of(trained.passes, StepMachine(launcher, feature_bytes))
            step = build_step(model, self._optimizer, trained.loss, config, parts.world, kind)
            training_state = TrainingState(step, order, progress, parts.world)
            saving = Saving(training_state, parts.outputs, parts.reporting, parts.world, self._identity, chosen)
            of_engine = training_state, ending, config, parts.world
            engine = Engine(*of_engine) if launcher is None else EarlyEngine(*of_engine, launcher=launcher)
            iterations = Iterations(parts, engine, saving, ending, trained, freed_memory)
            keep = fill(model, trained, self.splits, config, self._facts, parts.world, parts.screen)
            stack.push(lambda _, error, __: parts.reporting.close(progress, error))
            stack.enter_context(ending)
            stack.enter_context(freed_memory)
            self._open(saving, trained)
            progress.checkpoints = checkpoints
            parts.world.do_on_main(keep, "keep the reference")
            parts.screen.start(progress.iteration, config.iters)
            with ending.rescue(saving):
                iterations.run()
            report = str(parts.outputs.report) if parts.world.main else None
            result = Result.of(progress, parts.reporting.peak_memory, iterations.ended_early(), report)
            ended = "ended early" if result.stopped_early else "ended"
            if iterations.out_of_patience():
                ended += ", since the validation loss no longer fell"
            parts.reporting.write(progress, ended, running=False, result=result)
        return result

    def _order(self, trained: Training, ending: Ending) -> TrainingOrder:
        data = self._train_order
        if not self.config.samples_answers:
            return PeekableOrder(data)
        if not has_row_caches(self.model) and not has_vision(self.model):
            self.parts.screen.say(
                "Sampling: by mlx-lm's BatchGenerator, since the attention has caches of other kinds."
            )
        losses = trained.token_losses
        return sampled_order(self._answering, self.config, data, losses, self._rewards, ending, self.parts.world)

    @property
    def _answering(self) -> Loaded:
        """The model, and its tokenizer with the tokens that end an answer."""
        loaded = self._loaded
        if self.splits.plain_text:
            return loaded
        return dataclasses.replace(loaded, tokenizer=ending_answers(loaded.tokenizer))

    @property
    def about(self) -> dict[str, str]:
        """The description of the run, by name, for its report; empty until run() is called."""
        return self.parts.reporting.about

    def _announce(self, trained: Training, chosen: Rankings) -> None:
        parts = self.parts
        screen = parts.screen
        of_run = parts.model, parts.config, self.splits, trained, self._train_order, parts.world
        facts = announce.facts(*of_run, verbose=screen.verbose)
        for fact in [*facts, *parts.samples.notes, *announce.implementations(chosen)]:
            screen.say(fact)
        screen.panel("deltatune train")
        screen.expect([*trained.figures, *router_figures(parts.model)])
        if parts.outputs.note is not None:
            screen.say(parts.outputs.note)

    def _open(self, saving: Saving, trained: Training) -> None:
        """Continue a saved run or start a new one, then open its metrics and services."""
        parts = self.parts
        config = self.parts.config
        world = self.parts.world
        path = parts.outputs.state
        has_state = state.exists(path)
        ranks_with_state = world.sum_numbers(float(has_state))[0]
        if config.resume and 0 < ranks_with_state < world.size:
            raise UserError(
                f"--resume: {path} must be on every machine, and some lack it; share the folder, or copy it to all."
            )
        if world.main:
            for line in self._folder.make_room():
                parts.screen.say(line)
            parts.outputs.prepare()
        if config.resume and has_state:
            for line in [*saving.restore(), *announce.resumed(self.progress, config, world)]:
                parts.screen.say(line)
        elif config.resume:
            parts.screen.say(announce.nothing_to_resume(config))
        about = announce.about(parts.model, config, self.splits, trained)
        parts.reporting.open(self.progress, about, announce.layer_table(trained))


def _check(
    model: nn.Module,
    tokenizer: Any,
    config: TrainConfig,
    splits: Splits,
    *,
    bounds: Bounds | None,
    rewards: Rewards | None,
) -> None:
    """Refuse a run that cannot train as its options say, before anything is written or changed."""
    if bounds is None and config.memory is not None:
        raise UserError(
            "memory: which weights stay on the disk is not chosen. Train with deltatune.finetune(config), or leave "
            "memory out."
        )
    if rewards is None and config.loss == "grpo":
        raise UserError(
            "loss: grpo learns from rewards; give the Trainer rewards=Rewards(config), of deltatune.rewards."
        )
    if config.early_stopping is not None and not splits.valid:
        raise UserError("early_stopping needs validation data (valid.jsonl), and there is none.")
    if config.test and not splits.test:
        raise UserError("test needs test data (test.jsonl), and there is none.")
    judged = [isinstance(example, Preference) for example in (*splits.train[:1], *splits.valid[:1], *splits.test[:1])]
    prompts = any(isinstance(example, PromptExample) != (config.loss == "grpo") for example in splits.train[:1])
    if prompts or any(preference != config.has_preferences for preference in judged):
        raise UserError(
            f"loss: {config.loss} does not learn from these examples; load them with load_datasets(config, tokenizer) "
            "and the same config."
        )
    if config.samples_answers:
        check_covered(model, config)
    refuse_unread(TRAINING, changed_options(config), config, Facts(pictures=has_vision(model)))
    check_trainable(model, config)
    if not trainable_count(model):
        raise UserError("nothing in the model is trainable: convert it (convert_to_lora), or unfreeze layers.")
    if config.resize_embeddings and lacks_rows(model, tokenizer, from_scratch=config.from_scratch):
        raise UserError(
            "resize_embeddings: tokens were added to the tokenizer, and the model has no rows for them: call "
            "deltatune.models.vocabulary.resize_embeddings(loaded) before convert_to_lora."
        )
    _check_examples(model, tokenizer, config, (*splits.train, *splits.valid, *splits.test))


def _check_examples(model: nn.Module, tokenizer: Any, config: TrainConfig, examples: Iterable[Example]) -> None:
    documents = [document for example in examples for document in example.documents]
    check_examples(model, tokenizer, documents)
    check_positions(model, config.max_seq_length, documents)
