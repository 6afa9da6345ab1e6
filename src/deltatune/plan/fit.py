"""`deltatune plan`, and the check before `deltatune train`: what is planned, what is said, what is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.nn as nn

from ..config import TrainConfig
from ..data import BatchOrder, Splits
from ..data.datasets import first_image, load_datasets
from ..data.vision.media import largest_batch
from ..errors import UserError
from ..lora.adapter import Adapter
from ..lora.convert import adapters
from ..lora.weights import dense_weight
from ..models.load import load
from ..train.distributed import World
from ..train.setup import eyes, prepare
from . import screen
from .array_layout import Layout
from .device_limits import Limits, device_limits
from .forecast import Plan, plan_step
from .process_memory import LayoutError
from .search import Largest, fits, largest

_LONGEST = 1 << 17
_LENGTHS = 32
_MOST_ROWS = 1024
_MOST_RANK = 256


@dataclass(frozen=True)
class Found:
    """A plan of the run as asked for, the device's limits, the largest batch, length and rank (None: not sought)."""

    plan: Plan
    limits: Limits
    batch: Largest | None = None
    length: Largest | None = None
    rank: Largest | None = None


def examine(config: TrainConfig, limits: Limits | None = None) -> Found:
    """Plan the run that `config` describes, and look for the largest that fits. Weights stay on the disk."""
    config = _from_scratch(config)
    try:
        layout = Layout.measured()
    except LayoutError as error:
        raise UserError(
            f"plan: this MLX keeps its graphs in a way that is not known here ({error}); deltatune train works without."
        ) from error
    limits = limits or device_limits()
    image = first_image(config)
    loaded = _loaded(config, image)
    splits = load_datasets(config, loaded.tokenizer, eyes(loaded))
    prepare(loaded.model, config)
    rows, length = shape(config, splits)
    first = _step(loaded.model, config, splits, layout, rows, length)
    positions = _positions(loaded.config)

    def ranked(rank: int) -> Plan:
        changed = dataclasses.replace(config, lora_parameters=dataclasses.replace(config.lora_parameters, rank=rank))
        model = _loaded(changed, image).model
        prepare(model, changed)
        return _step(model, changed, splits, layout, rows, length)

    world = World().size
    bigger = partial(_step, loaded.model, config, splits, layout, length=length)
    batch = largest(bigger, limits, {rows: first}, step=1, most=max(rows, _MOST_ROWS), leap=_MOST_ROWS)
    longer = partial(_step, loaded.model, config, splits, layout, rows)
    longest = largest(longer, limits, {length: first}, step=_LENGTHS, most=max(length, positions))
    rank = None
    if config.fine_tune_type != "full":
        now = config.lora_parameters.rank
        most = max(now, min(_MOST_RANK, _widest(loaded.model)))
        rank = largest(ranked, limits, {now: first}, step=1, most=most, leap=_MOST_RANK)
    return Found(first, limits, _times(batch, world), longest, rank)


def check(model: nn.Module, config: TrainConfig, splits: Splits, *, force: bool = False) -> str:
    """One line on the run that is about to start. UserError, with what would make it fit, where it cannot (or a line,
    with `force`). Where this MLX cannot be looked into, the line says so."""
    rows, length = shape(config, splits)
    try:
        layout = Layout.measured()
        plan = _step(model, config, splits, layout, rows, length)
    except LayoutError as error:
        return f"Plan: none, since this MLX keeps its graphs in a way that is not known here ({error})."
    limits = device_limits()
    if fits(plan, limits):
        return screen.line(plan, limits)
    message = f"{screen.line(plan, limits)} {_mended(model, config, splits, plan, limits, layout)}"
    if force:
        return f"{message} Training all the same (--force)."
    raise UserError(f"{message} --force trains all the same.")


def shape(config: TrainConfig, splits: Splits) -> tuple[int, int]:
    """Rows and length of the run's largest batch, on one rank."""
    world = World()
    order = BatchOrder(
        splits.train, config.batch_size, config.max_seq_length, packed=config.pack, rank=world.rank, world=world.size
    )
    return config.batch_size // world.size, order.widths[-1]


def _mended(model: nn.Module, config: TrainConfig, splits: Splits, plan: Plan, limits: Limits, layout: Layout) -> str:
    """What would make the run fit: the least change first."""
    tried: list[tuple[str, TrainConfig]] = [("", config)]
    if not config.grad_checkpoint:
        changed = dataclasses.replace(config, grad_checkpoint=True)
        if fits(_step(model, changed, splits, layout, plan.rows, plan.length), limits):
            return "It fits with --grad-checkpoint."
        tried = [("--grad-checkpoint and ", changed)]
    for words, changed in tried:
        fewer = partial(_step, model, changed, splits, layout, length=plan.length)
        found = largest(fewer, limits, {}, step=1, most=plan.rows - 1)
        if found.value:
            return f"It fits with {words}--batch-size {found.value * World().size}."
        shorter = partial(_step, model, changed, splits, layout, plan.rows)
        found = largest(shorter, limits, {}, step=_LENGTHS, most=plan.length - 1)
        if found.value:
            return f"It fits with {words}--max-seq-length {found.value}."
    return "No batch size or length makes it fit: take a smaller or a quantised model."


def _step(model: nn.Module, config: TrainConfig, splits: Splits, layout: Layout, rows: int, length: int) -> Plan:
    """A plan with the images of the data as they are, whatever the length."""
    return plan_step(model, config, rows, length, layout, largest_batch(splits.train, rows))


def _from_scratch(config: TrainConfig) -> TrainConfig:
    if config.from_scratch:
        return dataclasses.replace(config, fine_tune_type="full", num_layers=-1)
    return config


def _loaded(config: TrainConfig, image: str | None) -> Any:
    return load(
        config.model,
        trust_remote_code=config.trust_remote_code,
        lazy=True,
        from_scratch=config.from_scratch,
        seed=config.seed,
        image=image,
    )


def _widest(model: nn.Module) -> int:
    """The largest rank that some adapted matrix can have."""
    bases = [adapter.base for adapter in adapters(model).values() if isinstance(adapter, Adapter)]
    return max((min(dense_weight(base).shape[-2:]) for base in bases), default=_MOST_RANK)


def _positions(model_config: dict[str, Any]) -> int:
    text = model_config.get("text_config") or model_config
    return int(text.get("max_position_embeddings") or _LONGEST)


def _times(found: Largest, world: int) -> Largest:
    return dataclasses.replace(found, value=found.value * world)
