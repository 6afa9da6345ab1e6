"""An adapter that goes to PEFT, and the training that goes on from there on this side. Needs no torch."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path

from deltatune.export.peft_adapter import PEFT_CONFIG, to_peft_adapter, write_peft
from deltatune.lora import adapters, convert_to_lora, load_adapters, save_adapters
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig
from deltatune.selftest.parity import ours, recording, seeded
from deltatune.selftest.parity.cases import RANK, SCALE, STEPS, Adapters, ParityCase, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.train.batch_loss import chunked_loss

# The cases whose recordings `make test` replays, and how many of their steps: one with experts, one without.
REPLAYED = ("qwen3_5_moe", "kimi_linear")
REPLAYED_STEPS = 9
# Adapters whose training is well conditioned, and gives no token two experts of almost equal scores; others take 0.
_DRAWS = {"bailing_hybrid": 5, "granitemoehybrid": 5, "olmo_hybrid": 2, "qwen3_5": 2, "qwen3_5_moe": 3, "qwen3_next": 1}
# PEFT has gate and up of the experts as one matrix, whose further training is another one.
_JOINED = ["*switch_mlp.gate_proj", "*switch_mlp.up_proj"]


@dataclass(frozen=True)
class Start:
    """The folders from which both sides go on: the base as mlx-lm reads it, our adapter, and its export to PEFT.

    `tensors` are the adapter's by PEFT's names.
    """

    checkpoint: Path
    adapter: Path
    exported: Path
    tensors: Adapters


def export(case: ParityCase, config: Config, weights: Weights, folder: Path) -> Start:
    """Write the checkpoint, draw an adapter for it, and export that."""
    start = Start(folder / "checkpoint", folder / "adapter", folder / "exported", {})
    model, _ = load_model(ours.write_save(start.checkpoint, config, weights))
    experts = any("switch_mlp" in path for path, _ in model.named_modules())
    convert_to_lora(model, LoraConfig(rank=RANK, scale=SCALE, exclude=_JOINED if experts else []))
    draw = partial(_drawn, _DRAWS.get(case.family.model_type.removesuffix("_text"), 0))
    model.update(tree_map_with_path(draw, model.trainable_parameters()))
    save_adapters(model, start.adapter, {})
    found = write_peft(start.checkpoint, start.adapter, start.exported)
    start.tensors.update(by_name(found.tensors))
    return start


def _drawn(draw: int, path: str, value: mx.array) -> mx.array:
    # The start of seeded.lora, in the shape that this module's factors have.
    inputs = value.shape[-1] if value.ndim == 3 else value.shape[0]
    deviation = inputs**-0.5 if path.endswith("lora_a") else 0.2 * RANK**-0.5
    return mx.array(seeded.spread(f"continued {draw} {path}", value.shape, deviation))


def by_name(tensors: dict[str, Any]) -> Adapters:
    """PEFT's tensors as adapters of one value each, as in runs and recordings."""
    return {name: {"value": np.array(value)} for name, value in tensors.items()}


def train(case: ParityCase, start: Start, adapter: Path, first: int = 0, steps: int = STEPS) -> ParityRun:
    """Go on training from `adapter`, on the batches from `first` on; its end has PEFT's names."""
    model, config = load_model(start.checkpoint)
    load_adapters(model, adapter)
    run = ours.train(
        model,
        adapters(model),
        str,
        case.family.learning_rate,
        lambda: chunked_loss(*ours.parts(model)),
        lambda index: ours.as_batch(seeded.batch(first + index)),
        steps,
    )
    return ParityRun(run.losses, {}, by_name(to_peft_adapter(model, config, "base").tensors))


def name_of(case: str) -> str:
    """The name of the recording of a case."""
    return f"continued/{case}"


def read(case: str) -> dict[str, Any]:
    """Read the recording of a case."""
    return json.loads(recording.path_of(name_of(case)).read_text())


def worst(tensors: dict[str, list[Any]], found: Adapters) -> tuple[float, str]:
    """The largest error of recorded tensors: (relative to the recorded length, name)."""
    return recording.worst({name: recording.Tensor(*value) for name, value in tensors.items()}, found)


def peft_config(start: Start) -> dict[str, Any]:
    """The exported adapter_config.json, without the folder of the base."""
    content = json.loads((start.exported / PEFT_CONFIG).read_text())
    del content["base_model_name_or_path"]
    return content
