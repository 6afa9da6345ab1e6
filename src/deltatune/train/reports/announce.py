"""Describes a run before its first step: model, trainable parameters, device, data and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...data import BatchOrder, Splits
from ...data.batches.stream_order import StreamedSplits, StreamOrder
from ...errors import first_few
from ...layers import LayerInfo
from ...lora.weights import is_quantized, quantization
from ...machine import backend
from ...ops import operators
from ...ops.operator.rankings import Rankings
from ...options.config import TrainConfig
from ...patches.patch_report import Serving
from ..distributed import World
from ..progress import Progress
from ..saved.state import exists, state_path
from ..setup import Training
from ..tree import leaves
from ..updates.optimizer import build_optimizer, undecayed, weight_decay
from .report import ReportTable
from .screen import Fact

UPSTREAMS = "upstream's own code"


def trainable_count(model: nn.Module) -> int:
    """Count the trainable numbers of `model`."""
    return sum(leaf.size for _, leaf in leaves(model.trainable_parameters()))


def layer_summary(layers: Sequence[LayerInfo]) -> str:
    """Describe the layers in one line, such as `24 layers: 18 delta, 6 attention; experts in 24`."""
    kinds = Counter(layer.kind for layer in layers)
    text = f"{len(layers)} layers: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    experts = sum(layer.experts for layer in layers)
    return f"{text}; experts in {experts}" if experts else text


def what_trains(model: nn.Module, config: TrainConfig) -> str:
    """Describe the trained parameters, such as `lora, 5,200 of 131,760 numbers (3.947%)`."""
    total = _stored_numbers(model)
    trains = trainable_count(model)
    return f"{config.fine_tune_type}, {trains:,} of {total:,} numbers ({trains / total:.3%})"


def examples(splits: Splits) -> str:
    """Describe the data, such as `44 training, 6 validation examples`."""
    if isinstance(splits, StreamedSplits):
        return f"training examples as they are read, {len(splits.valid):,} validation examples"
    return f"{len(splits.train):,} training, {len(splits.valid):,} validation examples"


def about(model: nn.Module, config: TrainConfig, splits: Splits, trained: Training) -> dict[str, str]:
    """Return the description of a run in its report, by name."""
    data = config.data if config.hf_dataset is None else str(config.hf_dataset)
    return {
        "model": f"{config.model}; {layer_summary(trained.layers)}",
        "trained": what_trains(model, config),
        "data": f"{data}; {examples(splits)}",
        **served(trained.patches.serving),
    }


def nothing_to_resume(config: TrainConfig) -> str:
    """Return the line of a run that was given --resume and found no state; it names runs beside its folder."""
    folder = Path(config.adapter_path)
    parent = folder.parent
    beside = [other for other in parent.iterdir() if exists(state_path(other))] if parent.is_dir() else []
    line = f"Note: there is nothing to resume in {folder}: training starts from the beginning."
    if not beside:
        return line
    names = first_few(sorted(map(str, beside)), most=4, separator=", ")
    return f"{line} If you meant another run, stop this one: --adapter-path may be {names}."


def resumed(progress: Progress, config: TrainConfig, world: World) -> list[str]:
    """Return the lines that say where a run continues, if it does, and whether its number of ranks has changed."""
    if progress.iteration >= config.iters:
        flag = "--iters"
        number = str(config.iters)
        if config.epochs is not None:
            flag = "--epochs"
            number = f"{config.epochs:g} ({config.iters:,} iterations)"
        return [
            f"Nothing is left to train: the run in {config.adapter_path} has done {progress.iteration:,} iterations, "
            f"and {flag} is {number}. To train further, give {flag} a larger number."
        ]
    lines = [f"Resuming after iteration {progress.iteration:,} of {config.iters:,}."]
    if progress.ranks not in (None, world.size):
        lines.append(
            f"The number of ranks is {world.size}; it was {progress.ranks} when the state was saved. The batches stay "
            "the same; sums are rounded in another order, and dropout draws other numbers."
        )
    return lines


def facts(
    model: nn.Module,
    config: TrainConfig,
    splits: Splits,
    trained: Training,
    order: BatchOrder | StreamOrder,
    world: World,
    *,
    verbose: bool = False,
) -> list[Fact | str]:
    """Return the facts that a run prints before its first step, and notes among them; `verbose` names every patch."""
    opening: list[Fact | str] = [Fact("model", f"{config.model}; {layer_summary(trained.layers)}")]
    opening.append(Fact("training", what_trains(model, config)))
    opening += _weight_decay(model, config)
    opening += [Fact(operator, by) for operator, by in served(trained.patches.serving).items()]
    if trained.patches.applied or trained.patches.left_alone:
        opening.append(Fact("patches", (str(trained.patches) if verbose else trained.patches.summary()).rstrip(".")))
    opening.append(Fact("device", "; BLAS: ".join(backend.facts().values())))
    if world.size > 1 and (gpus := mx.device_count(mx.gpu)) > 1:
        opening.append(
            f"Note: every rank sees {gpus} GPUs and computes on the first. Set CUDA_VISIBLE_DEVICES to one GPU for "
            "each rank, or import deltatune before anything uses mlx."
        )
    loss = f"{(splits.rule or 'Loss on the tokens that the examples name').rstrip('.')}; {trained.loss_kind}"
    opening.append(Fact("loss", loss.removeprefix("Loss "), line=f"{loss}."))
    *narrower, widest = (f"{width:,}" for width in order.widths)
    widths = f"{', '.join(narrower)} and {widest}" if narrower else widest
    opening.append(Fact("data", f"{examples(splits)}; {_batches(config, splits, order, world)}"))
    if config.epochs is not None and isinstance(order, BatchOrder):
        per_epoch = order.batches_per_epoch
        opening.append(
            Fact("epochs", f"{config.epochs:g} of {per_epoch:,} iterations each, so {config.iters:,} iterations")
        )
    opening.append(Fact("step", f"{trained.compiled}, once for each width of {widths} tokens"))
    opening += splits.notes
    left_over = config.iters % config.grad_accumulation_steps
    if left_over:
        opening.append(
            f"Note: {config.iters:,} iterations are no multiple of {config.grad_accumulation_steps:,} accumulation "
            f"steps: the last {left_over:,} will wait in the state for an update that a longer run would make."
        )
    return opening


def _batches(config: TrainConfig, splits: Splits, order: BatchOrder | StreamOrder, world: World) -> str:
    """Describe the batches, such as `44 rows an epoch, 4 a batch`."""
    if isinstance(splits, StreamedSplits):
        rows = f"{splits.stream.rows:,} rows are read and shuffled at a time"
    else:
        assert isinstance(order, BatchOrder)
        rows = f"{order.rows:,} {'row' if order.rows == 1 else 'rows'} an epoch"
    share = f", {config.batch_size // world.size} on each of {world.size} ranks" if world.size > 1 else ""
    if config.packs_data and isinstance(order, BatchOrder):
        an_update = len(splits.train) / order.rows * config.batch_size * config.grad_accumulation_steps
        share += f", about {an_update:,.0f} {'preferences' if config.has_preferences else 'examples'} an update"
    return f"{rows}, {config.batch_size} a batch{share}"


def _weight_decay(model: nn.Module, config: TrainConfig) -> list[Fact]:
    """Say which trained parameters weight decay leaves out, where it would take them as any other."""
    decay = weight_decay(build_optimizer(config))
    left_out = undecayed(model)
    if not decay or not left_out:
        return []
    those = f"{len(left_out):,} norms, biases and A_log"
    return [Fact("weight decay", f"{decay:g}, but of {those} none")]


def implementations(chosen: Rankings) -> list[str]:
    """Return a line on each class of calls that the plan has met, where its implementation was chosen by time.

    That is on Metal, where one more line says that the first iteration is long.
    """
    if not backend.compares_times():
        return []
    lines = [f"{key}: {names[0]} ({chosen.reasons[key]})." for key, names in chosen.names.items()]
    return [*lines, "The first iteration takes 20 to 60 seconds longer than others: Metal compiles its kernels."]


def served(told: Serving) -> dict[str, str]:
    """Name the layers' implementations, such as `{"gated delta": "chunk (automatic on cpu) in 18 of 18 layers"}`."""
    why = {operator.title: operator.order()[1] for operator in operators.OPERATORS}
    lines = {}
    for operator, layers in told.by_operator().items():
        reason = f" ({why[operator]})" if operator in why else ""
        lines[operator] = ", and ".join(
            f"{name + reason if name else UPSTREAMS} in {number} of {len(layers)} layers"
            for name, number in Counter(layers.values()).most_common()
        )
    return lines


def layer_table(trained: Training) -> list[ReportTable]:
    """Return the table of a report with the implementation of each layer; none where no layer was traced."""
    told = trained.patches.serving.by_operator()
    rows = [(path, name, by or UPSTREAMS) for name, layers in told.items() for path, by in layers.items()]
    return [ReportTable("What computes each layer", ("layer", "operator", "by"), rows, folded=True)] if rows else []


def _stored_numbers(model: nn.Module) -> int:
    """Count the numbers of the model; a quantized weight counts as the numbers that it encodes."""

    def count(module: Any) -> int:
        arrays = {key: leaf for key, leaf in module.items() if hasattr(leaf, "size") and not key.startswith("_")}
        sizes = {key: leaf.size for key, leaf in arrays.items()}
        if is_quantized(module):
            sizes |= {"weight": sizes["scales"] * quantization(module)["group_size"], "scales": 0, "biases": 0}
        return sum(sizes.values())

    return sum(count(module) for module in model.modules())
