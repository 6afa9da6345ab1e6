"""From the options of a run to a run that is ready: model, tokenizer, examples, their order, the step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers

from ..config import TrainConfig
from ..data import BatchOrder, Splits
from ..data.datasets import first_image, load_datasets
from ..data.example import Example
from ..data.reader import VisionProcessors
from ..layers import LayerInfo, describe, layer_paths
from ..lora import convert_to_lora, load_adapter_weights, load_adapters
from ..machine.compiling import without_kernels
from ..models.document_isolation import check_packing
from ..models.head import split_head
from ..models.load import Loaded, load, locate
from ..models.vision.adapters import refused_by_mlx_vlm
from ..models.vision.split import has_vision, split_vision, vision_spec
from ..ops.checkpoint import checkpointed
from ..patches import PatchReport, patched
from .distributed import World
from .step import LossFunction, Step, chunked_loss, full_loss

_CHUNKED = "chunked over the vocabulary, logits never held whole"


@dataclass
class Run:
    """What the options of a run name, loaded: the model with its tokenizer, and the examples of the splits."""

    config: TrainConfig
    loaded: Loaded
    splits: Splits
    world: World
    # Where the first image or video of the data stands; None where the data are text alone.
    image: str | None

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    def prepare(self) -> list[str]:
        """Make trainable what the options ask for; returns what a person should know of it."""
        return prepare(self.model, self.config)

    def order(self, examples: Sequence[Example]) -> BatchOrder:
        """The batches of `examples`, those of this rank."""
        return batch_order(examples, self.config, self.world)


def ready(
    config: TrainConfig, *, world: World | None = None, lazy: bool = False, adapter_path: str | None = None
) -> Run:
    """Load the model and the examples that `config` names.

    Args:
        config: the options of the run.
        world: the ranks that train together; by default those that MLX knows of.
        lazy: leave weights on the disk until they are used.
        adapter_path: the folder of an adapter to put on the model.

    Raises:
        UserError: for anything in the options, the model or the data that the user can mend.
    """
    config = settled(config)
    # Before the data are looked at for images: a model that is not there is said at once.
    path = locate(config.model)
    image = first_image(config)
    loaded = load_model(config, path, image=image, lazy=lazy, adapter_path=adapter_path)
    splits = load_datasets(config, loaded.tokenizer, vision_processors(loaded))
    return Run(config, loaded, splits, world or World(), image)


def settled(config: TrainConfig) -> TrainConfig:
    """The options with what follows from one of them: training from scratch trains every number of every layer."""
    if config.from_scratch:
        return dataclasses.replace(config, fine_tune_type="full", num_layers=-1)
    return config


def load_model(
    config: TrainConfig,
    path: str | Path | None = None,
    *,
    image: str | None,
    lazy: bool = False,
    adapter_path: str | None = None,
) -> Loaded:
    """The model of a run as its checkpoint has it, or drawn anew; `image`: where the data's first one stands."""
    return load_with_adapter(
        path or config.model,
        adapter_path,
        trust_remote_code=config.trust_remote_code,
        lazy=lazy,
        from_scratch=config.from_scratch,
        seed=config.seed,
        image=image,
    )


def load_with_adapter(model: str | Path, adapter_path: str | None, **options: Any) -> Loaded:
    """What models.load.load makes of `model` and `options`, with the adapter of `adapter_path` where one is given."""
    loaded = load(model, **options)
    if adapter_path:
        load_adapters(loaded.model, adapter_path)
        loaded.model.eval()
    return loaded


def vision_processors(loaded: Loaded) -> VisionProcessors | None:
    """What reading images takes, of a model that was loaded to look at some; None of a text model."""
    if loaded.processor is None:
        return None
    videos = getattr(loaded.processor, "video_processor", None)
    return VisionProcessors(loaded.processor.image_processor, vision_spec(loaded.model), videos)


def prepare(model: nn.Module, config: TrainConfig) -> list[str]:
    """Make the part of `model` trainable that `config` asks for, in place; returns what a person should know of it.

    The random state is set from `config.seed` first, so that adapters start the same on every rank.
    """
    mx.random.seed(config.seed)
    layers = config.num_layers
    if layers == TrainConfig.num_layers and len(layer_paths(model)) < layers:
        layers = -1
    report = convert_to_lora(
        model,
        config.lora_parameters,
        fine_tune_type=config.fine_tune_type,
        num_layers=layers,
        parts=[part.strip() for part in config.parts.split(",") if part.strip()],
    )
    if config.from_scratch:
        _unfreeze_beside_layers(model)
    if config.resume_adapter_file is not None:
        load_adapter_weights(model, config.resume_adapter_file)
    return [*report.summary(), *refused_by_mlx_vlm(model)]


def _unfreeze_beside_layers(model: nn.Module) -> None:
    """Embeddings, norms and heads: what full fine-tuning leaves as the checkpoint has it, and scratch cannot."""
    inside = tuple(layer_paths(model))
    for path, module in model.named_modules():
        if path not in inside and not path.startswith(tuple(f"{layer}." for layer in inside)):
            module.unfreeze(recurse=False)


def batch_order(examples: Sequence[Example], config: TrainConfig, world: World | None = None) -> BatchOrder:
    """The batches of `examples` as `config` says: this rank's rows of them, or without `world` all rows."""
    return BatchOrder(
        examples,
        config.batch_size,
        config.max_seq_length,
        seed=config.seed,
        packed=config.pack,
        rank=world.rank if world else 0,
        world=world.size if world else 1,
    )


def build_step(
    model: nn.Module, optimizer: mlx.optimizers.Optimizer, loss: LossFunction, config: TrainConfig, world: World
) -> Step:
    """The training step that `config` describes."""
    return Step(
        model,
        optimizer,
        loss,
        world,
        accumulate=config.grad_accumulation_steps,
        clip=config.grad_clip,
        expert_updates=config.expert_updates,
    )


def choose_loss(model: nn.Module, *, compare: bool = True) -> tuple[LossFunction, str]:
    """The chunked vocabulary loss where the model can be split before its head, else the full one; and which it is.

    compare: False takes the model apart without computing, so without comparing the parts with the whole.
    """
    if has_vision(model):
        whole = split_vision(model, compare=compare)
        return chunked_loss(whole.backbone, whole.head), _CHUNKED
    split = split_head(model, compare=compare)
    if split.backbone is None or split.head is None:
        return full_loss(model), f"over all logits at once: {split.reason}"
    return chunked_loss(split.backbone, split.head), _CHUNKED


@dataclass(frozen=True)
class Training:
    """A model as it is while it trains: its loss and layers, the patches in force, and how its step is compiled."""

    loss: LossFunction
    loss_kind: str
    layers: list[LayerInfo]
    patches: PatchReport
    compiled: str


@contextlib.contextmanager
def training(model: nn.Module, config: TrainConfig, *, compare: bool = True) -> Iterator[Training]:
    """Within the context, `model` is as it trains: patched, and its layers recomputed where `config` asks for that.

    Args:
        model: converted, so that what is to train is trainable.
        config: the options of the run.
        compare: False splits the model before its head without computing, so without comparing the parts with it,
            and takes it for granted that packed documents stay apart.

    Raises:
        UserError: where packed documents do not stay apart in this model.
    """
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(without_kernels())
        patches = stack.enter_context(patched(model))
        layers = describe(model)
        if config.pack and compare:
            check_packing(model)
        if config.grad_checkpoint:
            stack.enter_context(checkpointed([layer.module for layer in layers]))
        yield Training(*choose_loss(model, compare=compare), layers, patches, compiled)
