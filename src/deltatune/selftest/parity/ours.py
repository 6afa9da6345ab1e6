"""Replays a recorded run with mlx-lm's model under deltatune's patches, adapters, compiled step and loss."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data import Batch
from ...lora import convert_to_lora
from ...machine.compiling import without_kernels
from ...models.head import split_head
from ...models.load import load_model
from ...options.config import LoraConfig, TrainConfig
from ...patches import patched
from ...train.batch_loss import LossFunction, chunked_loss
from ...train.distributed import World
from ...train.step import Step
from ...train.tree import at, number
from ...train.updates.optimizer import build_optimizer
from . import seeded
from .cases import BETAS, EPS, GROUP_SIZE, RANK, SCALE, STEPS, WEIGHT_DECAY, Adapters, ParityCase, ParityRun
from .families import Config, Weights


def quantise(model: nn.Module, bits: int) -> nn.Module:
    """Quantise the model as `mlx_lm.convert -q` does: every matrix, by the family's own rules for the router."""

    def chosen(path: str, module: nn.Module) -> bool | dict:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % GROUP_SIZE:
            return False
        return model.quant_predicate(path, module)

    nn.quantize(model, GROUP_SIZE, bits, class_predicate=chosen)
    return model


def write_save(folder: Path, config: Config, weights: Weights) -> Path:
    """Write config.json and model.safetensors into a folder, which may be new, as Hugging Face does; return it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def from_save(config: Config, weights: Weights, load: Callable[[Path], nn.Module]) -> nn.Module:
    """The model that `load` reads from a folder with these weights, saved as Hugging Face does."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(write_save(Path(folder), config, weights))
        mx.eval(model.parameters())
    return model


def load(case: ParityCase, config: Config, weights: Weights) -> nn.Module:
    """mlx-lm's model of a Hugging Face save; a tensor that is missing or left over is an error."""
    model = from_save(config, weights, lambda folder: load_model(folder)[0])
    return model if case.bits is None else quantise(model, case.bits)


def adapt(case: ParityCase, model: nn.Module, adapters: Adapters) -> dict[str, nn.Module]:
    """Add the initial `adapters` to the model; returns the adapted modules by transformers' paths."""
    return install(model, adapters, case.family.mlx_path, "dora" if case.dora else "lora")


def install(
    model: nn.Module, adapters: Adapters, mlx_path: Callable[[str], str], kind: str = "lora"
) -> dict[str, nn.Module]:
    """Convert exactly the modules in `adapters`, named by transformers' paths, to `kind`, with these initial values.

    `mlx_path` maps a path of transformers to the model's own. Returns the adapted modules by transformers' paths.
    """
    paths = {path: mlx_path(path) for path in adapters}
    lora = LoraConfig(rank=RANK, scale=SCALE, keys=list(paths.values()))
    report = convert_to_lora(model, lora, fine_tune_type=kind)
    if set(report.converted) != set(paths.values()):
        raise ValueError(f"expected adapters on {paths}, came {report.converted}; skipped {report.skipped}")
    named = dict(model.named_modules())
    modules = {path: named[mlx_path] for path, mlx_path in paths.items()}
    for path, module in modules.items():
        for key, value in adapters[path].items():
            if module[key].shape != value.shape:
                raise ValueError(f"{path}.{key}: the adapter has {module[key].shape}, its initial value {value.shape}")
            module[key] = mx.array(value)
    return modules


def as_batch(rows: seeded.Rows) -> Batch:
    """The rows as the batch that a training step takes."""
    inputs, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    return Batch(inputs, targets, rows.counts, None, tuple(("",) for _ in inputs), tuple((0,) for _ in inputs))


def _adapters(modules: dict[str, Any]) -> Adapters:
    keys = ("lora_a", "lora_b", "m")
    return {path: {key: np.array(m[key]) for key in keys if key in m} for path, m in modules.items()}


def train(
    model: nn.Module,
    modules: dict[str, nn.Module],
    mlx_path: Callable[[str], str],
    learning_rate: float,
    prepare: Callable[[], LossFunction],
    batch: Callable[[int], Batch],
    steps: int = STEPS,
) -> ParityRun:
    """Follow the recipe on the adapted `modules`, by transformers' paths, through deltatune's patches, step and loss.

    `prepare` returns the loss once the patches are in force, and `batch` the batch of a step.
    """
    settings = {"betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    constant: dict[str, Any] = {"lr_schedule": "constant", "warmup": 0.0, "learning_rate": learning_rate}
    config = TrainConfig(optimizer_config={"adamw": settings}, **constant)
    model.train()
    losses: list[float] = []
    first: Adapters = {}
    with without_kernels(), patched(model) as report:
        if not report.complete:
            raise ValueError(str(report))
        loss = prepare()
        optimizer = build_optimizer(config)
        step = Step(model, optimizer, loss, World())
        for index in range(steps):
            total, weight, gradients, _ = step.micro_batch(batch(index), None)
            norm = step.update(gradients, total, weight)
            mx.eval(total, weight, norm, gradients, model.parameters(), optimizer.state)
            losses.append(number(total) / number(weight))
            if index == 0:
                parts = step.bundles.part(gradients)
                first = _adapters({path: at(parts, mlx_path(path)) for path in modules})
    return ParityRun(losses, first, _adapters(modules))


def parts(model: nn.Module) -> tuple[Callable, nn.Module]:
    """The model's backbone and head."""
    backbone, head, reason = split_head(model)
    if backbone is None or head is None:
        raise ValueError(reason)
    return backbone, head


def run(
    case: ParityCase,
    config: Config,
    weights: Weights,
    adapters: Adapters,
    once_patched: Callable[[], None] = lambda: None,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    once_patched: called when the patches are in force.
    """
    model = load(case, config, weights)
    modules = adapt(case, model, adapters)

    def prepare() -> LossFunction:
        once_patched()
        return chunked_loss(*parts(model))

    family = case.family
    return train(
        model, modules, family.mlx_path, family.learning_rate, prepare, lambda index: as_batch(seeded.batch(index))
    )
