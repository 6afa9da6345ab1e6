"""Prepares a run from its options: model, tokenizer, examples, batches, loss and step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers

from ..data import Batch, BatchOrder, Splits
from ..data.batches.batch import row_capacity
from ..data.batches.order import AnsweredOrder
from ..data.batches.stream_order import StreamedSplits, StreamOrder
from ..data.datasets import first_image, load_datasets
from ..data.example import Example
from ..data.vision.media import VisionProcessors
from ..errors import UserError
from ..layers import LayerInfo, describe, layer_paths
from ..lora import convert_to_lora
from ..lora.new_rows import grown_tables
from ..machine.compiling import without_kernels
from ..models.adapted_base import load, refused_by_mlx_vlm
from ..models.document_isolation import check_packing
from ..models.generate import PolicyHead, SampledPolicy
from ..models.head import split_head
from ..models.known_faults import fault_notes
from ..models.layer_caches import carries
from ..models.load import Loaded, comes_from_hub, locate, refuse_unserved
from ..models.vision.split import has_vision, split_vision, vision_spec
from ..models.vocabulary import check_examples, resize_embeddings
from ..ops.checkpoint import checkpointed
from ..ops.recomputation import Checkpoints, cheap_recomputed
from ..options.config import TrainConfig
from ..patches import INFERENCE, PACKING, TRAINING, PatchReport, patched
from .batch_loss import LossFunction, chunked_loss, full_loss
from .distillation import checked_teacher, distillation_loss, teacher_of
from .distributed import World
from .mtp_loss import FIGURES, mtp_loss
from .options_check import check_options, check_positions
from .policy_loss import figures_of, rollout_loss
from .preferences.objectives import (
    Objective,
    TokenLosses,
    chunked_token_losses,
    full_token_losses,
    objective_of,
    preference_loss,
)
from .step import Step
from .updates.optimizer import UpdateOptions, undecayed, weight_decay
from .updates.routers import router_loss

_CHUNKED = "chunked over the vocabulary, logits never held whole"


@dataclass(frozen=True)
class Run:
    """A run with its model and data loaded.

    `image` says where the first image or video of the data is, or None if they are text only; `notes` are on known
    faults of the model that the rows reach; `teacher` is the model that the loss imitates, where it imitates one.
    """

    config: TrainConfig
    loaded: Loaded
    splits: Splits
    world: World
    image: str | None
    notes: list[str]
    teacher: nn.Module | None

    @property
    def model(self) -> nn.Module:
        """The loaded model."""
        return self.loaded.model

    def prepare(self) -> list[str]:
        """Make the model trainable as the options say; return lines that describe it to the user."""
        return prepare(self.model, self.config)

    def training_order(self) -> BatchOrder | StreamOrder:
        """Return this rank's batches to train on."""
        return training_order(self.splits, self.config, self.world)

    def order(self, examples: Sequence[Example]) -> BatchOrder:
        """Return this rank's batches of `examples`."""
        return batch_order(examples, self.config, self.world)


def ready(
    config: TrainConfig, *, world: World | None = None, lazy: bool = False, adapter_path: str | None = None
) -> Run:
    """Load the model and the examples that `config` names, with the adapter of the folder `adapter_path`.

    `lazy` leaves weights on the disk, or undrawn, until they are used, and an adapter to the caller. The ranks of
    `world` train together; those of the launcher by default.
    """
    if config.train:
        check_options(config)
    # A wrong path is reported at once, and data that are missing before a model is downloaded.
    path = None if comes_from_hub(config.model) else locate(config.model)
    image = first_image(config)
    path = path or locate(config.model)
    if not config.force:
        refuse_unserved(path, uses(config), image=image, trust_remote_code=config.trust_remote_code)
    loaded = load_model(config, path, image=image, lazy=lazy, adapter_path=adapter_path)
    teacher = checked_teacher(config, loaded) if config.loss == "distill" else None
    splits = load_datasets(config, loaded.tokenizer, vision_processors(loaded))
    check_examples(loaded.model, loaded.tokenizer, splits.documents())
    check_positions(loaded.model, config.max_seq_length, splits.documents())
    lengths = [document.positions for document in splits.documents()]
    # The rows of a stream may be as long as the options allow.
    lengths += [config.max_seq_length] * isinstance(splits, StreamedSplits)
    notes = fault_notes(loaded.model, loaded.config, lengths)
    return Run(config, loaded, splits, world or World(), image, notes, teacher)


def uses(config: TrainConfig) -> tuple[str, ...]:
    """The uses of a run's model, for patched()."""
    return (TRAINING, INFERENCE, PACKING) if config.pack else (TRAINING, INFERENCE)


def load_model(
    config: TrainConfig,
    path: str | Path | None = None,
    *,
    image: str | None,
    lazy: bool = False,
    adapter_path: str | None = None,
) -> Loaded:
    """Load the model of a run from the folder `path`, or initialise it randomly if it is trained from scratch.

    `image` says where the first image of the data is; None for text. The others are as in ready().
    """
    loaded = load(
        path or config.model,
        adapter_path,
        bare=lazy,
        mtp=bool(config.mtp),
        trust_remote_code=config.trust_remote_code,
        lazy=lazy,
        from_scratch=config.from_scratch,
        seed=config.seed,
        image=image,
    )
    if config.resize_embeddings:
        resize_embeddings(loaded, config.seed if config.from_scratch else None, lazy=lazy)
    return loaded


def vision_processors(loaded: Loaded) -> VisionProcessors | None:
    """Return the processors that read images and videos for a vision model; None for a text model."""
    if loaded.processor is None:
        return None
    videos = getattr(loaded.processor, "video_processor", None)
    return VisionProcessors(loaded.processor.image_processor, vision_spec(loaded.model), videos)


def prepare(model: nn.Module, config: TrainConfig) -> list[str]:
    """Make `model` trainable in place, as `config` says; return lines that describe it to the user.

    The random state is first set from `config.seed`, so that adapters start the same on every rank.
    """
    mx.random.seed(config.seed)
    report = convert_to_lora(
        model,
        config.lora_parameters,
        fine_tune_type=config.fine_tune_type,
        num_layers=config.num_layers,
        parts=config.trained_parts,
    )
    if config.from_scratch:
        _unfreeze_beside_layers(model)
    return [*report.summary(), *_new_rows(model, config), *refused_by_mlx_vlm(model)]


def _new_rows(model: nn.Module, config: TrainConfig) -> list[str]:
    lines = [
        f"New rows: {table.end - table.first:,} in {path}, for the token ids from {table.first:,}; they start "
        "at the mean of the old rows, and train whole."
        for path, table in grown_tables(model).items()
    ]
    if config.resize_embeddings and not config.from_scratch and not lines:
        lines = ["resize_embeddings: the embedding has a trained row for every token, so it stays as it is."]
    return lines


def _unfreeze_beside_layers(model: nn.Module) -> None:
    """Unfreeze embeddings, norms and heads, which full fine-tuning leaves frozen: training from scratch needs them."""
    inside = tuple(layer_paths(model))
    for path, module in model.named_modules():
        if path not in inside and not path.startswith(tuple(f"{layer}." for layer in inside)):
            module.unfreeze(recurse=False)


def batch_order(examples: Sequence[Example], config: TrainConfig, world: World | None = None) -> BatchOrder:
    """Return the batches of `examples` as `config` says: this rank's rows, or all rows if `world` is None."""
    of_order: tuple[Any, ...] = (examples, config.batch_size, row_capacity(config))
    more: dict[str, Any] = {"seed": config.seed, "packed": config.packs_data}
    if world is not None:
        more |= {"rank": world.rank, "world": world.size}
    if config.loss == "distill" and config.samples_answers:
        return AnsweredOrder(*of_order, answer=config.max_completion_length, **more)
    return BatchOrder(*of_order, **more)


def training_order(
    splits: Splits,
    config: TrainConfig,
    world: World | None = None,
    check: Callable[[Iterable[Example]], None] | None = None,
) -> BatchOrder | StreamOrder:
    """Return the batches to train on, as batch_order does; those of a stream come from one window after the other.

    `check` raises a UserError for examples of a stream that cannot be trained on.
    """
    if not isinstance(splits, StreamedSplits):
        return batch_order(splits.train, config, world)

    def in_window(examples: Sequence[Example]) -> BatchOrder:
        if check is not None:
            check(examples)
        return batch_order(examples, config, world)

    return StreamOrder(splits.stream, splits.first, in_window, row_capacity(config))


def settled(config: TrainConfig, splits: Splits, order: BatchOrder | StreamOrder) -> TrainConfig:
    """Return the options with those that the data decide.

    These are the variables of the chat template that the answers need, and the iterations that `epochs` stands for.
    """
    variables = splits.template_options
    iters = config.iters
    if config.epochs is not None and isinstance(order, BatchOrder):
        # A product such as 0.1 * 30 may be a little above the whole number that it stands for.
        iters = max(1, math.ceil(config.epochs * order.batches_per_epoch - 1e-6)) * config.num_iterations
    variables = config.chat_template_config if variables is None else variables
    return dataclasses.replace(config, iters=iters, chat_template_config=variables)


def build_step(
    model: nn.Module,
    optimizer: mlx.optimizers.Optimizer,
    loss: LossFunction,
    config: TrainConfig,
    world: World,
    kind: Callable[..., Step] = Step,
) -> Step:
    """Build the training step that `config` describes, inside training(); `kind` is its class."""
    left_out = frozenset(undecayed(model)) if weight_decay(optimizer) else ()
    return kind(
        model,
        optimizer,
        loss,
        world,
        update=UpdateOptions(config.grad_accumulation_steps, config.grad_clip, left_out),
        routers=router_loss(model, config, world),
    )


def choose_loss(model: nn.Module, *, compare: bool = True) -> tuple[LossFunction, str]:
    """Choose the loss: chunked over the vocabulary if the model can be split before its head, else over all logits.

    Returns it with a description for the user; `compare` computes the model's parts and compares them with the whole.
    """
    parts, kind = _parts(model, compare)
    return chunked_loss(*parts) if parts else full_loss(model), kind


def _parts(model: nn.Module, compare: bool) -> tuple[tuple[Any, Any] | None, str]:
    """Return the model's backbone and head, or None if it cannot be split, and how the loss is computed, in words."""
    if has_vision(model):
        vision = split_vision(model, compare=compare)
        return (vision.backbone, vision.head), _CHUNKED
    split = split_head(model, compare=compare)
    if split.backbone is None or split.head is None:
        return None, f"over all logits at once: {split.reason}"
    return (split.backbone, split.head), _CHUNKED


@dataclass(frozen=True)
class Training:
    """A model's set-up by training(); `loss_kind` and `compiled` describe the loss and the compiled step in words.

    `objective` is a preference loss, `token_losses` the tokens' losses of one or of rollouts, and `figures` the names
    of figures that a loss reports besides its sums. `passes` are those of a step by layers (by_layer.layer_passes),
    where weights are not all in memory. `taught` returns a batch with the arrays that `teacher` computes before a step.
    """

    loss: LossFunction
    loss_kind: str = ""
    layers: list[LayerInfo] = field(default_factory=list)
    patches: PatchReport = field(default_factory=PatchReport)
    compiled: str = ""
    objective: Objective | None = None
    token_losses: TokenLosses | None = None
    figures: tuple[str, ...] = ()
    passes: Any = None
    teacher: nn.Module | None = None
    taught: Callable[[Batch], Batch] = lambda batch: batch


@contextlib.contextmanager
def training(
    model: nn.Module, config: TrainConfig, *, compare: bool = True, checkpoints: Checkpoints | None = None
) -> Iterator[Training]:
    """Set a trainable model up for training inside the `with` block: patched, and checkpointed if `config` says so.

    `compare` checks by computing that the model's parts agree with the whole, and that packed documents do not
    influence each other. `checkpoints` are recomputed in the place of the layers that `config.grad_checkpoint` names.
    """
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(without_kernels())
        rows = config.batch_size * config.rows_each
        report = stack.enter_context(patched(model, strict=not config.force, uses=uses(config), rows=rows))
        if config.loss == "distill":
            stack.enter_context(patched(teacher_of(config), strict=not config.force, uses=uses(config)))
        layers = describe(model)
        if config.pack and compare:
            check_packing(model, row_capacity(config))
        chosen = _checkpoints(len(layers), config, checkpoints)
        if chosen.layers:
            carried = carries(model, layers)
            modules = [layers[at].module for at in chosen.layers]
            stack.enter_context(checkpointed(modules, [carried[at] for at in chosen.layers]))
        if chosen.operators:
            stack.enter_context(cheap_recomputed())
        trained = with_loss(model, config, compare)
        yield dataclasses.replace(trained, layers=layers, patches=report, compiled=compiled)


def with_loss(model: nn.Module, config: TrainConfig, compare: bool) -> Training:
    """Return the set-up with the loss that `config` names."""
    if config.mtp:
        parts, kind = _parts(model, compare)
        loss = mtp_loss(model, _needed(parts, kind, config), config)
        words = f"{kind}, {'' if config.mtp == 'only' else 'and '}of the multi-token-prediction head"
        return Training(loss, words, figures=FIGURES)
    if config.loss == "sft":
        return Training(*choose_loss(model, compare=compare))
    parts, kind = _parts(model, compare)
    if config.loss == "distill":
        teacher = teacher_of(config)
        # A comparison reads all weights of the teacher, some of which `memory` leaves on the disk.
        compare = compare and config.memory is None
        loss = distillation_loss(_needed(parts, kind, config), teacher, config, compare=compare)
        words = f"divergence from {config.teacher}, {kind}"
        return Training(loss, words, teacher=teacher)
    objective = objective_of(config)
    if objective is None:
        policy = SampledPolicy.of(config, model)
        backbone, head = _needed(parts, kind, config)
        of_policy = chunked_token_losses(backbone, head if policy.is_plain else PolicyHead(head, policy))
        loss = rollout_loss(of_policy, config)
        return Training(loss, kind, token_losses=of_policy, figures=figures_of(config))
    token_losses = chunked_token_losses(*parts) if parts else full_token_losses(model)
    loss = preference_loss(token_losses, objective, config)
    return Training(loss, kind, objective=objective, token_losses=token_losses, figures=objective.figures)


def _needed(parts: tuple[Any, Any] | None, kind: str, config: TrainConfig) -> tuple[Any, Any]:
    if parts is None:
        raise UserError(f"loss: {config.loss} scores tokens a chunk at a time, and the loss of this model is {kind}")
    return parts


def _checkpoints(layers: int, config: TrainConfig, chosen: Checkpoints | None) -> Checkpoints:
    """Return which of so many layers are recomputed: the `chosen` ones, or those of `config.grad_checkpoint`."""
    if chosen is not None:
        return chosen
    if config.grad_checkpoint == "auto":
        raise UserError(
            "grad_checkpoint: auto recomputes the layers that a plan chooses, and none was made. Train with "
            "deltatune.finetune(config), or set grad_checkpoint to true or false."
        )
    return Checkpoints(range(layers) if config.grad_checkpoint else ())
