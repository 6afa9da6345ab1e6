"""The same run here: mlx-vlm's model under deltatune's patches, taken apart, in the compiled step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...config import TrainConfig
from ...data import Batch
from ...machine.compiling import without_kernels
from ...models.load import load_vision_tower
from ...models.vision.inputs import Picture, VisionSpec, single_frames, token_positions, vision_batch
from ...models.vision.split import split_vision, vision_spec
from ...patches import patched
from ...train.distributed import World
from ...train.optimizer import build_optimizer
from ...train.step import Step, chunked_loss
from ...train.tree import number
from .cases import BETAS, EPS, STEPS, WEIGHT_DECAY, Adapters, ParityRun
from .families import Config, Weights
from .ours import _adapters, _inside, installed
from .vision import VisionCase, VisionRows, batch, mlx_path


def load(case: VisionCase, config: Config, weights: Weights) -> nn.Module:
    """mlx-vlm's model of a Hugging Face save."""
    config, weights = case.readable(config, weights)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        tensors = {name: mx.array(value) for name, value in weights.items()}
        mx.save_safetensors(str(Path(folder) / "model.safetensors"), tensors, {"format": "pt"})
        model = load_vision_tower(Path(folder))
        mx.eval(model.parameters())
    return model


def adapt(model: nn.Module, adapters: Adapters) -> dict[str, nn.Module]:
    """Convert by deltatune, on exactly these transformers paths, and set the initial values; path -> module."""
    return installed(model, adapters, mlx_path)


def as_batch(rows: VisionRows, spec: VisionSpec) -> Batch:
    """The batch as deltatune's data makes it."""
    ready = []
    for index, size in enumerate(rows.lengths):
        tokens, grids = rows.tokens[index, :size], rows.grids[index]
        pictures = [Picture(patches, grid) for patches, grid in zip(rows.patches[index], grids, strict=True)]
        # The last token is predicted and never read.
        ready.append((tokens[:-1], token_positions(tokens, single_frames(grids), spec)[:, :-1], pictures))
    inputs, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    images = vision_batch(ready, inputs.shape[1], spec)
    empty = tuple(("",) for _ in inputs)
    return Batch(inputs, targets, rows.counts, None, empty, tuple((0,) for _ in inputs), images)


def run(
    case: VisionCase, config: Config, weights: Weights, adapters: Adapters, plant: Callable[[], None] = lambda: None
) -> ParityRun:
    """The whole recipe, from a Hugging Face save. `plant` runs once the patches are in force."""
    settings = {"betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY, "bias_correction": True}
    options = TrainConfig(optimizer="adamw", optimizer_config={"adamw": settings}, learning_rate=case.learning_rate)
    model = load(case, config, weights)
    modules = adapt(model, adapters)
    model.train()
    losses: list[float] = []
    first: Adapters = {}
    with without_kernels(), patched(model) as report:
        if not report.complete:
            raise ValueError(str(report))
        split, spec = split_vision(model), vision_spec(model)
        plant()
        optimizer = build_optimizer(options)
        step = Step(model, optimizer, chunked_loss(split.backbone, split.head), World())
        for index in range(STEPS):
            total, weight, gradients = step.micro_batch(as_batch(batch(index, case.videos), spec), None)
            norm = step.update(gradients, total, weight)
            mx.eval(total, weight, norm, gradients, model.parameters(), optimizer.state)
            losses.append(number(total) / number(weight))
            if index == 0:
                apart = step.bundles.part(gradients)
                first = _adapters({path: _inside(apart, mlx_path(path)) for path in modules})
    return ParityRun(losses, first, _adapters(modules))
