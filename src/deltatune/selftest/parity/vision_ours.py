"""Replays a recorded run with mlx-vlm's model, split at its vision tower, under deltatune's patches and step."""

from __future__ import annotations

from collections.abc import Callable

import mlx.nn as nn

from ...data import Batch
from ...models.load import load_vision_tower
from ...models.vision.inputs import Picture, VisionSpec, single_frames, token_positions, vision_batch
from ...models.vision.split import split_vision, vision_spec
from ...train.batch_loss import LossFunction, chunked_loss
from .cases import Adapters, ParityRun
from .families import Config, Weights
from .ours import from_save, install, train
from .vision import VisionCase, VisionRows, batch, mlx_path


def load(case: VisionCase, config: Config, weights: Weights) -> nn.Module:
    """mlx-vlm's model of a Hugging Face save."""
    return from_save(*case.readable(config, weights), load_vision_tower)


def adapt(model: nn.Module, adapters: Adapters) -> dict[str, nn.Module]:
    """Add the initial `adapters` to the model; returns the adapted modules by transformers' paths."""
    return install(model, adapters, mlx_path)


def as_batch(rows: VisionRows, spec: VisionSpec) -> Batch:
    """The batch in the form that deltatune's data code gives it."""
    ready = []
    for index, size in enumerate(rows.lengths):
        tokens = rows.tokens[index, :size]
        grids = rows.grids[index]
        pictures = [Picture(patches, grid) for patches, grid in zip(rows.patches[index], grids, strict=True)]
        # The last token is a target only, never an input.
        ready.append((tokens[:-1], token_positions(tokens, single_frames(grids), spec)[:, :-1], pictures))
    inputs = rows.tokens[:, :-1]
    targets = rows.tokens[:, 1:]
    images = vision_batch(ready, inputs.shape[1], spec)
    empty = tuple(("",) for _ in inputs)
    return Batch(inputs, targets, rows.counts, None, empty, tuple((0,) for _ in inputs), images)


def run(
    case: VisionCase,
    config: Config,
    weights: Weights,
    adapters: Adapters,
    once_patched: Callable[[], None] = lambda: None,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    once_patched: called when the patches are in force.
    """
    model = load(case, config, weights)
    modules = adapt(model, adapters)

    def prepare() -> LossFunction:
        split = split_vision(model)
        once_patched()
        return chunked_loss(split.backbone, split.head)

    def batch_of(index: int) -> Batch:
        return as_batch(batch(index, case.videos), vision_spec(model))

    return train(model, modules, mlx_path, case.learning_rate, prepare, batch_of)
