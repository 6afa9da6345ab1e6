"""Makes a model ready to train: adapters put around the chosen modules, everything else frozen; or layers unfrozen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..config import LoraConfig
from ..errors import UserError
from .adapter import Adapter
from .parts import check_parts, part_of
from .select import adapter_class, chosen_layers, select
from .weights import dense_weight, is_quantized

FINE_TUNE_TYPES = ("lora", "dora", "full")

# Router biases that a balancing rule moves, never a gradient: weight decay must not shrink them.
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass
class ConversionReport:
    """What conversion did: `converted` paths, `skipped` path -> reason, `notes` for a person."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> list[str]:
        """Lines for a person: the notes, then what was left alone, modules that differ by numbers alone in one line."""
        groups: dict[tuple[str, str], int] = {}
        for path, reason in self.skipped.items():
            key = (re.sub(r"\.\d+\.", ".*.", path), reason)
            groups[key] = groups.get(key, 0) + 1
        times = {key: f" ({count} of them)" if count > 1 else "" for key, count in groups.items()}
        return self.notes + [f"Left alone: {path}{times[path, reason]}: {reason}." for path, reason in groups]


def convert_to_lora(
    model: nn.Module,
    config: LoraConfig,
    *,
    fine_tune_type: str = "lora",
    num_layers: int = -1,
    parts: Sequence[str] = ("language",),
) -> ConversionReport:
    """Freeze `model` in place and make the chosen part of it trainable.

    lora, dora: adapters around the modules that `select.select` finds; with `rslora` the scale is divided by
    sqrt(rank) (https://arxiv.org/abs/2312.03732). full: the chosen layers themselves, without what is quantised.
    parts: of a model with images, any of language, vision and projector.
    UserError for patterns, layers or ranks that do not fit the model.
    """
    if fine_tune_type not in FINE_TUNE_TYPES:
        raise UserError(f"fine_tune_type: {fine_tune_type!r} is not known; expected {', '.join(FINE_TUNE_TYPES)}.")
    check_parts(model, list(parts))
    if fine_tune_type == "full":
        return _unfreeze_layers(model, config, num_layers, parts)
    if not 0 <= config.dropout < 1:
        raise UserError(f"dropout: {config.dropout} is not a share; expected 0 or more and less than 1.")
    dora = fine_tune_type == "dora"
    selection = select(model, config, dora=dora, num_layers=num_layers, parts=parts)
    _check_rank(selection.targets, config.rank)
    scale = config.scale / config.rank**0.5 if config.rslora else config.scale
    ranks = dict.fromkeys(selection.targets, config.rank)
    install_adapters(model, make_adapters(model, ranks, scale, config.dropout, dora=dora))
    return ConversionReport(list(selection.targets), selection.skipped, _notes(selection.targets, dora))


def make_adapters(
    model: nn.Module, ranks: dict[str, int], scale: float, dropout: float, *, dora: bool = False
) -> dict[str, nn.Module]:
    """An adapter of the given rank around each named module; the model stays as it is."""
    modules = dict(model.named_modules())
    made: dict[str, nn.Module] = {}
    for path, rank in ranks.items():
        module = modules[path]
        if not dora and hasattr(module, "to_lora"):
            made[path] = module.to_lora(r=rank, scale=scale, dropout=dropout)
            continue
        kind = adapter_class(module, dora)
        if isinstance(kind, str):
            raise UserError(f"{path}: {kind}.")
        made[path] = kind.from_base(module, rank, scale, dropout)
    return made


def install_adapters(model: nn.Module, made: dict[str, nn.Module]) -> None:
    """Put adapters where the modules they adapt were, in place; from then on only adapters train."""
    for path, module in model.named_modules():
        if path in made:
            made[path].train(module.training)
    model.update_modules(tree_unflatten(list(made.items())))
    model.freeze()
    for adapter in adapters(model).values():
        _unfreeze_adapter(adapter)


def adapters(model: nn.Module) -> dict[str, nn.Module]:
    """{path: adapter} of every adapter in the model, a layer's own (made by its `to_lora`) included."""
    return {path: m for path, m in reversed(model.named_modules()) if isinstance(m, Adapter) or "lora_a" in m}


def _unfreeze_adapter(adapter: nn.Module) -> None:
    if isinstance(adapter, Adapter):
        adapter.unfreeze_adapter()
    else:
        adapter.unfreeze(recurse=False)


def _check_rank(targets: dict[str, nn.Module], rank: int) -> None:
    limits = {path: min(dense_weight(module).shape[-2:]) for path, module in targets.items()}
    widest = max(limits, key=lambda path: limits[path])
    if rank > limits[widest]:
        raise UserError(
            f"rank: {rank} is above every chosen matrix; the largest, {widest}, has rank {limits[widest]} at most."
        )


def _notes(targets: dict[str, nn.Module], dora: bool) -> list[str]:
    notes = []
    odd = [path for path, module in targets.items() if is_quantized(module) and 32 % module.bits]
    if dora and odd:
        notes.append(
            f"mlx-lm cannot load DoRA on {len(odd)} modules of 3, 5 or 6 bits, such as {odd[0]}; deltatune can."
        )
    return notes


def _unfreeze_layers(model: nn.Module, config: LoraConfig, num_layers: int, parts: Sequence[str]) -> ConversionReport:
    report = ConversionReport()
    model.freeze()
    modules = dict(model.named_modules())
    if config.keys is not None:
        report.notes.append("keys choose modules for adapters; full fine-tuning trains whole layers and ignores them.")
    towers = [path for path in modules if part_of(path) in parts and not list(modules[path].children())]
    layers = chosen_layers(model, config, num_layers) if "language" in parts else []
    for path in [*layers, *towers]:
        report.converted.append(path)
        for name, module in modules[path].named_modules():
            if is_quantized(module):
                report.skipped[f"{path}.{name}"] = "quantised weights have no gradient"
                continue
            module.unfreeze(recurse=False)
            module.freeze(recurse=False, keys=[key for key in _ROUTER_BIASES if key in module])
    return report
