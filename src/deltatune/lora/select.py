"""Chooses the modules that get an adapter, by name pattern, kind of layer, layer index and part of the model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.nn as nn

from ..errors import UserError
from ..layers import layer_kind, layer_paths
from ..options.config import LoraConfig
from .adapter import Adapter
from .experts import LoRASwitchLinear
from .linear import DoRAEmbedding, DoRALinear, LoRAEmbedding, LoRALinear
from .new_rows import GrownTable, directly_read, grown_tables
from .weights import is_switch

#: The part of a model that is its multi-token-prediction head, and the name of that child of the model.
MTP = "mtp"
# The parts of a model: its language layers, with images its vision tower and the projector between them, and its head.
PARTS = ("language", "vision", "projector", MTP)
_TOWER = "vision_tower"
_PROJECTORS = ("merger", "projector", "aligner", "connector")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

NO_EXPERT_DORA = "DoRA is not defined on experts; train them with fine_tune_type lora"


@dataclass
class Selection:
    """The modules that `select` chose, their ranks, and those that cannot take an adapter."""

    # The modules that get an adapter, by path, in the model's order.
    targets: dict[str, nn.Module] = field(default_factory=dict)
    # The rank of each target's adapter.
    ranks: dict[str, int] = field(default_factory=dict)
    # The path of each module that was chosen but cannot take an adapter, and why not.
    skipped: dict[str, str] = field(default_factory=dict)


def chosen_layers(model: nn.Module, config: LoraConfig, num_layers: int) -> list[str]:
    """Return the paths of the layers to train: those at `config.layers`, or the last `num_layers`, of
    `config.layer_kinds`.

    Indices go from -count to count - 1, and a `num_layers` of -1, 0 or above the model's means all. UserError for an
    index or kind that the model does not have.
    """
    paths = layer_paths(model)
    count = len(paths)
    if config.layers is not None:
        for index in config.layers:
            if not -count <= index < count:
                raise UserError(f"layers: no layer {index!r}; the model has layers 0 to {count - 1}.")
        indices = sorted({index % count for index in config.layers})
    else:
        indices = list(range(count))[-max(num_layers, 0) :]
    chosen = [paths[index] for index in indices]
    wanted = config.layer_kinds
    if wanted is None:
        return chosen
    modules = dict(model.named_modules())
    kinds = {path: layer_kind(modules[path]) for path in chosen}
    matching = [path for path in chosen if kinds[path] in wanted]
    if not matching:
        present = ", ".join(sorted(set(kinds.values())))
        raise UserError(f"layer_kinds: no layer of kind {' or '.join(wanted)} among those chosen; they are {present}.")
    return matching


def adapter_class(module: nn.Module, dora: bool) -> type[Adapter] | str:
    """Return the class of adapter for a module, or the reason why there is none."""
    call = type(module).__call__
    if call in (nn.Linear.__call__, nn.QuantizedLinear.__call__):
        return DoRALinear if dora else LoRALinear
    if call in (nn.Embedding.__call__, nn.QuantizedEmbedding.__call__):
        return DoRAEmbedding if dora else LoRAEmbedding
    if is_switch(module):
        return NO_EXPERT_DORA if dora else LoRASwitchLinear
    return f"it is a {type(module).__name__}, and adapters go on linear layers, embeddings and experts"


def select(
    model: nn.Module,
    config: LoraConfig,
    *,
    dora: bool = False,
    num_layers: int = -1,
    parts: Sequence[str] = ("language",),
) -> Selection:
    """Choose the modules to adapt, with their ranks.

    Without `config.keys`, these are every linear, expert and embedding module of the chosen layers (for the part
    "language") and every linear of the vision tower ("vision"), of its projector ("projector") or of the
    multi-token-prediction head ("mtp"). With keys, they are the modules with a full path, path inside a chosen layer,
    or name that matches a pattern. A full path without wildcards also selects a module outside the chosen layers. With
    the part "mtp" alone, all are the head's. UserError for a pattern that selects nothing that can take an adapter.
    """
    layers = chosen_layers(model, config, num_layers)
    for path in grown_tables(model):
        if path in (config.keys or []):
            raise UserError(f"keys: {path!r} gets rows for new tokens, which train whole, and so takes no adapter.")
    names = _ModuleNames(model, layer_paths(model))
    matched = _matches(names, config, layers, parts)
    selection = Selection()
    for path in matched:
        module = names.modules[path]
        kind = LoRALinear if hasattr(module, "to_lora") and not dora else adapter_class(module, dora)
        if isinstance(kind, str):
            selection.skipped[path] = kind
        else:
            selection.targets[path] = module
    for path, array in directly_read(model, selection.targets).items():
        del selection.targets[path]
        selection.skipped[path] = f"its {array} is read directly by its owner, which would bypass an adapter"
    _refuse_keys_without_target(selection, matched, names, config)
    selection.ranks = _ranks(selection, names, config)
    return selection


class _ModuleNames:
    """Every module with a matrix of its own, outside adapters, by its full path and by its path inside its layer."""

    def __init__(self, model: nn.Module, layers: list[str]):
        whole = {path: module for path, module in model.named_modules() if isinstance(module, (Adapter, GrownTable))}
        inside = tuple(f"{path}." for path in whole)
        self.modules = {
            path: module
            for path, module in reversed(model.named_modules())
            if path not in whole and not path.startswith(inside) and "weight" in module and module["weight"].ndim > 1
        }
        # The path of the layer that a module belongs to, or an empty string.
        self.layer: dict[str, str] = {}
        for path in self.modules:
            self.layer[path] = next((layer for layer in layers if path.startswith(layer + ".")), "")

    def relative(self, path: str) -> str:
        """The path inside the layer, or the full path of a module outside all layers."""
        return path[len(self.layer[path]) + 1 :] if self.layer[path] else path

    def match(self, pattern: str, path: str) -> bool:
        """Whether a pattern matches this module's full path, its path inside the layer, or its name alone."""
        if pattern in self.modules:
            return path == pattern
        # A name such as q_proj stands for all modules of this name, as in PEFT's target_modules.
        names = (path, self.relative(path), path.rpartition(".")[2])
        return any(fnmatchcase(name, pattern) for name in names)


def _matches(names: _ModuleNames, config: LoraConfig, layers: list[str], parts: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of the modules asked for, in the model's order, with the patterns that match each."""
    for pattern in config.exclude:
        if not any(names.match(pattern, path) for path in names.modules):
            raise UserError(f"exclude: {pattern!r} matches no module{_suggestion(pattern, names)}.")
    matched: dict[str, list[str]] = {}
    for path in names.modules:
        part = part_of(path)
        if any(names.match(pattern, path) for pattern in config.exclude) or (list(parts) == [MTP] and part != MTP):
            continue
        if config.keys is None:
            if part is not None:
                wanted = part in parts and adapter_class(names.modules[path], False) in (LoRALinear, LoRASwitchLinear)
            else:
                wanted = "language" in parts and names.layer[path] in layers
                # No one asks for an adapter on a convolution without a word on keys.
                wanted = wanted and not isinstance(names.modules[path], _CONVOLUTIONS)
            patterns = ["*"] if wanted else []
        else:
            in_choice = not names.layer[path] or names.layer[path] in layers
            patterns = [key for key in config.keys if key == path or (in_choice and names.match(key, path))]
        if patterns:
            matched[path] = patterns
    return matched


def _refuse_keys_without_target(
    selection: Selection, matched: dict[str, list[str]], names: _ModuleNames, config: LoraConfig
) -> None:
    for key in config.keys or []:
        paths = [path for path, patterns in matched.items() if key in patterns]
        if any(path in selection.targets for path in paths):
            continue
        if paths:
            reason = selection.skipped[paths[0]]
            raise UserError(f"keys: {key!r} matches nothing that takes an adapter: {paths[0]}: {reason}.")
        if any(names.match(key, path) for path in names.modules):
            raise UserError(f"keys: {key!r} matches only modules that `exclude` or the choice of layers leaves out.")
        raise UserError(f"keys: {key!r} matches no module{_suggestion(key, names)}.")
    if not selection.targets:
        raise UserError("No module is left to adapt: widen keys, layers or layer_kinds, or shorten exclude.")


def _ranks(selection: Selection, names: _ModuleNames, config: LoraConfig) -> dict[str, int]:
    """Return the rank of each target; UserError for a pattern of `rank_pattern` that sets none."""
    ranks = dict.fromkeys(selection.targets, config.rank)
    used = set()
    for path in ranks:
        pattern = next((pattern for pattern in config.rank_pattern if names.match(pattern, path)), None)
        if pattern is not None:
            ranks[path] = config.rank_pattern[pattern]
            used.add(pattern)
    for pattern in config.rank_pattern:
        if pattern in used:
            continue
        matching = [path for path in names.modules if names.match(pattern, path)]
        if not matching:
            raise UserError(f"rank_pattern: {pattern!r} matches no module{_suggestion(pattern, names)}.")
        if selection.targets.keys().isdisjoint(matching):
            raise UserError(
                f"rank_pattern: {pattern!r} matches only modules that get no adapter, such as {matching[0]}."
            )
        raise UserError(f"rank_pattern: {pattern!r} sets no rank, since earlier patterns match all of its modules.")
    return ranks


def _suggestion(pattern: str, names: _ModuleNames) -> str:
    known = sorted({name for path in names.modules for name in (path, names.relative(path), path.rpartition(".")[2])})
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    if "expert" in pattern or "moe" in pattern:
        # Checkpoints and other libraries name experts in many ways; all of them mean this model's experts.
        holders = {names.relative(path).rpartition(".")[0] for path, m in names.modules.items() if is_switch(m)}
        close = [*(f"{holder}.*" for holder in sorted(holders)), *close][:3]
    return f" (nearest: {', '.join(close)})" if close else ""


def check_parts(model: nn.Module, parts: list[str]) -> None:
    """Raise UserError unless `parts` names one or more parts that the model has."""
    for part in parts:
        if part not in PARTS:
            raise UserError(f"parts: {part!r} is not known; expected any of {', '.join(PARTS)}.")
    if not parts:
        raise UserError(f"parts: expected at least one of {', '.join(PARTS)}.")
    if MTP in parts and not isinstance(model.get(MTP), nn.Module):
        raise UserError("parts: mtp: this model was loaded without its multi-token-prediction head.")
    if set(parts) - {"language", MTP} and not isinstance(model.get(_TOWER), nn.Module):
        raise UserError(
            f"parts: {', '.join(parts)}: this model was loaded without a vision tower, which is loaded only when the "
            "data has images."
        )


def part_of(path: str) -> str | None:
    """Return "vision", "projector" or "mtp" for the path of a module of that part, and None for any other module."""
    steps = path.split(".")
    if steps[0] == MTP:
        return MTP
    if steps[0] == "language_model":
        return None
    if any(word in step for step in steps for word in _PROJECTORS):
        return "projector"
    return "vision" if steps[0] == _TOWER else None
