"""Chooses the modules that get an adapter: by name pattern, by kind of layer, by layer index."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.nn as nn

from ..config import LoraConfig
from ..errors import UserError
from ..layers import layer_kind, layer_paths
from .adapter import Adapter
from .directly_read import directly_read
from .embedding import DoRAEmbedding, LoRAEmbedding
from .experts import LoRASwitchLinear
from .linear import DoRALinear, LoRALinear
from .parts import part_of
from .weights import is_switch

LAYER_KINDS = ("delta", "attention", "mamba", "other")
NO_EXPERT_DORA = "DoRA is not defined on experts; train them with fine_tune_type lora"


@dataclass
class Selection:
    """`targets`: module paths, in the model's order, to what they hold. `skipped`: path -> why it was left alone."""

    targets: dict[str, nn.Module] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def chosen_layers(model: nn.Module, config: LoraConfig, num_layers: int) -> list[str]:
    """Paths of the layers to train: `layers` by index, else the last `num_layers` (-1: all), then `layer_kinds`."""
    paths = layer_paths(model)
    count = len(paths)
    if config.layers is not None:
        for index in config.layers:
            if not isinstance(index, int) or not -count <= index < count:
                raise UserError(f"layers: no layer {index!r}; the model has layers 0 to {count - 1}.")
        wanted = sorted({index % count for index in config.layers})
    else:
        if num_layers > count:
            raise UserError(f"num_layers: {num_layers} asked for, but the model has {count}; -1 means all.")
        wanted = list(range(count))[-max(num_layers, 0) :]
    if config.layer_kinds is not None:
        wanted = _of_kind(model, paths, wanted, config.layer_kinds)
    return [paths[index] for index in wanted]


def _of_kind(model: nn.Module, paths: list[str], wanted: list[int], asked: list[str]) -> list[int]:
    for kind in asked:
        if kind not in LAYER_KINDS:
            raise UserError(f"layer_kinds: {kind!r} is not known; expected any of {', '.join(LAYER_KINDS)}.")
    modules = dict(model.named_modules())
    kinds = [layer_kind(modules[path]) for path in paths]
    chosen = [index for index in wanted if kinds[index] in asked]
    if not chosen:
        held = ", ".join(sorted({kinds[index] for index in wanted}))
        raise UserError(f"layer_kinds: no layer of kind {' or '.join(asked)} among those chosen; they are {held}.")
    return chosen


def adapter_class(module: nn.Module, dora: bool) -> type[Adapter] | str:
    """The adapter for a module, or why it has none."""
    call = type(module).__call__
    if call in (nn.Linear.__call__, nn.QuantizedLinear.__call__):
        return DoRALinear if dora else LoRALinear
    if call in (nn.Embedding.__call__, nn.QuantizedEmbedding.__call__):
        return DoRAEmbedding if dora else LoRAEmbedding
    if is_switch(module):
        return NO_EXPERT_DORA if dora else LoRASwitchLinear
    return f"{type(module).__name__} is no kind of layer that takes an adapter"


def select(
    model: nn.Module,
    config: LoraConfig,
    *,
    dora: bool = False,
    num_layers: int = -1,
    parts: Sequence[str] = ("language",),
) -> Selection:
    """The modules to adapt.

    Without `keys`, every linear, expert and embedding module of the chosen layers (the part "language"), and every
    linear of the vision tower ("vision") or its projector ("projector"), as `parts` names them. With them, what a
    pattern matches by its full path, or by its path inside a chosen layer (the form of mlx_lm.lora's keys); a full path
    without wildcards counts outside the chosen layers too. UserError for a pattern that yields nothing to adapt.
    """
    layers = chosen_layers(model, config, num_layers)
    paths = layer_paths(model)
    found = Selection()
    names = _Names(model, paths)
    picked = _matches(names, config, layers, parts)
    usable = {}
    for path in picked:
        module = names.modules[path]
        kind = LoRALinear if hasattr(module, "to_lora") and not dora else adapter_class(module, dora)
        if isinstance(kind, str):
            found.skipped[path] = kind
        else:
            usable[path] = module
    for path, array in directly_read(model, usable).items():
        del usable[path]
        found.skipped[path] = f"its {array} is read directly by its owner, which an adapter could not follow"
    found.targets = usable
    _refuse_empty(found, picked, names, config)
    return found


class _Names:
    """Every module with a weight of its own, outside adapters, by full path and by path inside its layer."""

    def __init__(self, model: nn.Module, layers: list[str]):
        self.modules = {path: m for path, m in _outside_adapters(model) if "weight" in m and m["weight"].ndim > 1}
        self.layer: dict[str, str] = {}
        for path in self.modules:
            self.layer[path] = next((layer for layer in layers if path.startswith(layer + ".")), "")

    def relative(self, path: str) -> str:
        """The path inside the layer, or the full path outside any."""
        return path[len(self.layer[path]) + 1 :] if self.layer[path] else path

    def match(self, pattern: str, path: str) -> bool:
        """Whether a pattern names this module by either path."""
        return fnmatchcase(path, pattern) or fnmatchcase(self.relative(path), pattern)


def _outside_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = [path + "." for path, module in model.named_modules() if isinstance(module, Adapter)]
    for path, module in reversed(model.named_modules()):
        if not isinstance(module, Adapter) and not path.startswith(tuple(inside)):
            yield path, module


def _matches(names: _Names, config: LoraConfig, layers: list[str], parts: Sequence[str]) -> dict[str, list[str]]:
    """{path: patterns that picked it}, in the model's order."""
    if config.rank < 1:
        raise UserError(f"rank: {config.rank} is not a rank; expected 1 or more.")
    for pattern in config.exclude:
        if not any(names.match(pattern, path) for path in names.modules):
            raise UserError(f"exclude: {pattern!r} matches no module{_suggestion(pattern, names)}.")
    picked: dict[str, list[str]] = {}
    for path in names.modules:
        if any(names.match(pattern, path) for pattern in config.exclude):
            continue
        if config.keys is None:
            if (part := part_of(path)) is not None:
                wanted = part in parts and adapter_class(names.modules[path], False) is LoRALinear
            else:
                wanted = "language" in parts and names.layer[path] in layers
            by = ["*"] if wanted else []
        else:
            here = not names.layer[path] or names.layer[path] in layers
            by = [key for key in config.keys if key == path or (here and names.match(key, path))]
        if by:
            picked[path] = by
    return picked


def _refuse_empty(found: Selection, picked: dict[str, list[str]], names: _Names, config: LoraConfig) -> None:
    for key in config.keys or []:
        mine = [path for path, by in picked.items() if key in by]
        if any(path in found.targets for path in mine):
            continue
        if mine:
            raise UserError(
                f"keys: {key!r} matches nothing that takes an adapter: {mine[0]}: {found.skipped[mine[0]]}."
            )
        if any(names.match(key, path) for path in names.modules):
            raise UserError(f"keys: {key!r} matches only modules that `exclude` or the choice of layers leaves out.")
        raise UserError(f"keys: {key!r} matches no module{_suggestion(key, names)}.")
    if not found.targets:
        raise UserError("No module is left to adapt: widen keys, layers or layer_kinds, or shorten exclude.")


def _suggestion(pattern: str, names: _Names) -> str:
    known = sorted({name for path in names.modules for name in (path, names.relative(path))})
    if any(name.endswith("." + pattern) for name in known):
        return f" (did you mean '*.{pattern}'?)"
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    if "expert" in pattern or "moe" in pattern:
        # By whatever name a checkpoint or another library knows them, experts are what is meant.
        holders = {names.relative(path).rpartition(".")[0] for path, m in names.modules.items() if is_switch(m)}
        close = [*(f"{holder}.*" for holder in sorted(holders)), *close][:3]
    return f" (nearest: {', '.join(close)})" if close else ""
