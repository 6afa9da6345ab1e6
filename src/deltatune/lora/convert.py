"""Makes a model ready to train: freezes it, then adds adapters to the chosen modules or unfreezes the chosen layers.

Adapters are merged into the model again, or taken away for a while (models/checkpoint_writer.py merges in files).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import UserError
from ..options.config import LoraConfig
from .adapter import Adapter
from .new_rows import grown_tables, unfreeze_new_rows
from .select import MTP, Selection, adapter_class, check_parts, chosen_layers, part_of, select
from .weights import dense_weight, is_quantized, quantization

FINE_TUNE_TYPES = ("lora", "dora", "full")

# A load-balancing rule sets these router biases, not a gradient; unfrozen, weight decay would shrink them.
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass
class ConversionReport:
    """The modules that a conversion changed in a model, and those that it skipped."""

    # The paths of the modules that train, or of the tensors that were loaded.
    converted: list[str] = field(default_factory=list)
    # The path of each module that was chosen but does not train, and why not.
    skipped: dict[str, str] = field(default_factory=dict)
    # Sentences for the user.
    notes: list[str] = field(default_factory=list)

    def summary(self) -> list[str]:
        """Return lines to print: the notes, then the skipped modules, one line for the same module of all layers."""
        counts = Counter((re.sub(r"\.\d+\.", ".*.", path), reason) for path, reason in self.skipped.items())
        skipped = []
        for (path, reason), count in counts.items():
            times = f" ({count} of them)" if count > 1 else ""
            skipped.append(f"Note: {path}{times} stays as it is: {reason}.")
        return self.notes + skipped


def convert_to_lora(
    model: nn.Module,
    config: LoraConfig,
    *,
    fine_tune_type: str = "lora",
    num_layers: int = -1,
    parts: Sequence[str] = ("language",),
) -> ConversionReport:
    """Freeze `model` in place, and make the chosen part of it trainable, and new rows of embeddings (new_rows.py).

    Args:
        model: A model of mlx-lm or mlx-vlm, or any with a list `layers`.
        config: Which modules get an adapter, and its rank and scale. With `rslora` the scale is divided by sqrt(rank),
            as in https://arxiv.org/abs/2312.03732.
        fine_tune_type: "lora" or "dora" adds adapters to the chosen modules; "full" trains the chosen layers
            themselves, except quantised weights.
        num_layers: How many layers to choose from, counted from the last; -1 means all.
        parts: Which parts of the model train, any of "language", "vision", "projector" and "mtp".

    Returns:
        A report of the trained modules, and of chosen ones that cannot train.

    Raises:
        UserError: A pattern, layer, rank or part does not fit the model.

    Example:
        >>> loaded = deltatune.load("mlx-community/Qwen3-0.6B-4bit")
        >>> report = convert_to_lora(loaded.model, LoraConfig(rank=16, keys=["*.q_proj", "*.v_proj"]))
    """
    if fine_tune_type not in FINE_TUNE_TYPES:
        raise UserError(f"fine_tune_type: {fine_tune_type!r} is not known; expected {', '.join(FINE_TUNE_TYPES)}.")
    check_parts(model, list(parts))
    _complete(model)
    if fine_tune_type == "full":
        return _unfreeze_layers(model, config, num_layers, parts)
    dora = fine_tune_type == "dora"
    selection = select(model, config, dora=dora, num_layers=num_layers, parts=parts)
    _check_ranks(selection, config.rank, dora)
    made: dict[str, nn.Module] = {}
    for rank in dict.fromkeys(selection.ranks.values()):
        equal = {path: rank for path in selection.ranks if selection.ranks[path] == rank}
        # They share one number for their scale, by which adapters that can be computed together are found.
        made |= make_adapters(model, equal, config.scale_at(rank), config.dropout, dora=dora)
    install_adapters(model, made)
    return ConversionReport(list(selection.targets), selection.skipped, _notes(selection.targets, dora))


def make_adapters(
    model: nn.Module, ranks: dict[str, int], scale: float, dropout: float, *, dora: bool = False
) -> dict[str, nn.Module]:
    """Make an adapter for each module of `ranks` (path to rank), and return them by path; the model is not changed."""
    modules = dict(model.named_modules())
    new_adapters: dict[str, nn.Module] = {}
    for path, rank in ranks.items():
        module = modules[path]
        if not dora and hasattr(module, "to_lora"):
            new_adapters[path] = module.to_lora(r=rank, scale=scale, dropout=dropout)
            continue
        kind = adapter_class(module, dora)
        if isinstance(kind, str):
            raise UserError(f"{path}: {kind}.")
        new_adapters[path] = kind.from_base(module, rank, scale, dropout)
    return new_adapters


def install_adapters(model: nn.Module, new_adapters: dict[str, nn.Module]) -> None:
    """Replace modules of `model` by the adapters made for them, given by path, and leave only adapters trainable."""
    _complete(model)
    for path, module in model.named_modules():
        if path in new_adapters:
            new_adapters[path].train(module.training)
    model.update_modules(tree_unflatten(list(new_adapters.items())))
    model.freeze()
    for adapter in adapters(model).values():
        if isinstance(adapter, Adapter):
            adapter.unfreeze_adapter()
        else:
            adapter.unfreeze(recurse=False)
    unfreeze_new_rows(model)


def _complete(model: nn.Module) -> None:
    """Set the attributes of nn.Module.__init__, which mlx-lm's recurrent_gemma does not call; freezing needs them."""
    for module in model.modules():
        for name, value in vars(nn.Module()).items():
            vars(module).setdefault(name, value)


def adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Return every adapter in the model by its path, including those that a layer's own `to_lora` made."""
    return {path: m for path, m in reversed(model.named_modules()) if isinstance(m, Adapter) or "lora_a" in m}


def _check_ranks(selection: Selection, of_others: int, dora: bool) -> None:
    """Refuse a rank above all of its matrices, and adapters that cannot be saved beside those of other ranks."""
    limits = {path: min(dense_weight(module).shape[-2:]) for path, module in selection.targets.items()}
    most = max(selection.ranks.values())
    for rank in set(selection.ranks.values()):
        widest = max((path for path in limits if selection.ranks[path] == rank), key=lambda path: limits[path])
        if rank > limits[widest]:
            raise UserError(
                f"{'rank' if rank == of_others else 'rank_pattern'}: {rank} is above every chosen matrix; the largest, "
                f"{widest}, has rank {limits[widest]} at most: choose a lower rank."
            )
    for path, module in selection.targets.items():
        if selection.ranks[path] < most and not dora and hasattr(module, "to_lora"):
            raise UserError(
                f"rank_pattern: {path} is a {type(module).__name__}, which mlx-lm adapts itself and cannot save with "
                f"another rank than the highest, here {most}; give it that rank, or exclude it."
            )


def _notes(targets: dict[str, nn.Module], dora: bool) -> list[str]:
    notes = []
    packed = [path for path, module in targets.items() if is_quantized(module) and 32 % quantization(module)["bits"]]
    if dora and packed:
        count = f"{len(packed)} modules of 3, 5 or 6 bits, such as {packed[0]}"
        notes.append(f"mlx-lm cannot load DoRA on {count}; deltatune can.")
    if any(part_of(path) == MTP for path in targets):
        notes.append(
            "mlx-lm refuses adapters of a multi-token-prediction head, which it does not load: deltatune merge makes a "
            "model with both, and deltatune export --to mlx an adapter without the head."
        )
    return notes


def whole_modules(model: nn.Module, config: LoraConfig, num_layers: int, parts: Sequence[str]) -> list[str]:
    """Return the paths of the modules that full fine-tuning trains: the chosen layers, and the modules of towers."""
    modules = dict(model.named_modules())
    towers = [path for path in modules if part_of(path) in parts and not list(modules[path].children())]
    layers = chosen_layers(model, config, num_layers) if "language" in parts else []
    return [*layers, *towers]


def _unfreeze_layers(model: nn.Module, config: LoraConfig, num_layers: int, parts: Sequence[str]) -> ConversionReport:
    report = ConversionReport()
    model.freeze()
    modules = dict(model.named_modules())
    for path in whole_modules(model, config, num_layers, parts):
        if not is_quantized(modules[path]):
            report.converted.append(path)
        for name, module in modules[path].named_modules():
            if is_quantized(module):
                report.skipped[f"{path}.{name}" if name else path] = "quantised weights have no gradient"
                continue
            module.unfreeze(recurse=False)
            module.freeze(recurse=False, keys=[key for key in _ROUTER_BIASES if key in module])
    unfreeze_new_rows(model)
    return report


def merge(model: nn.Module, dequantize: bool = False) -> list[str]:
    """Replace every adapter of `model`, in place, by a module like its base with the update; return the adapters'
    paths.

    A quantised base is quantised again with the same settings, which rounds the update along with the weight, unless it
    becomes dense by `dequantize`.
    """
    fused = {path: adapter.fuse(dequantize=dequantize) for path, adapter in adapters(model).items()}
    if fused:
        model.update_modules(tree_unflatten(list(fused.items())))
    return list(fused)


def can_be_without(model: nn.Module) -> bool:
    """Tell whether the base of `model` is in it: all that was trained is adapters, which can be taken away."""
    kinds = [isinstance(adapter, Adapter) for adapter in adapters(model).values()]
    return bool(kinds) and all(kinds) and not grown_tables(model)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the base of each adapter in its place inside the `with` block, so that the base answers."""
    adapted = {path: adapter for path, adapter in adapters(model).items() if isinstance(adapter, Adapter)}
    model.update_modules(tree_unflatten([(path, adapter.base) for path, adapter in adapted.items()]))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten(list(adapted.items())))
