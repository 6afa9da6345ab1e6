"""Reads an adapter in PEFT's format and writes it in MLX's (`deltatune import`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from packaging.version import InvalidVersion, Version

from ..errors import UserError, first_few
from ..lora import save_adapters
from ..lora.adapter_files import read_weights
from ..lora.convert import install_adapters, make_adapters
from ..lora.select import MTP
from ..lora.weights import input_size
from ..machine.json_files import read_json
from ..models.adapted_base import LOADER, add_head, layers_for_mlx_vlm, loader_of
from ..models.load import load_model, load_vision_tower, locate
from .module_names import Places, TransformersNames, short
from .new_token_rows import install_rows, take_rows
from .peft_adapter import HALVES, PEFT_CONFIG, PEFT_WEIGHTS, Factors, from_early_peft, from_peft, split

_TENSOR = re.compile(
    r"^(?P<module>.+?)\.(?:(?P<leaf>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
    r"|lora_embedding_(?P<embedding>A|B)(?:\.default)?)$"
)
_PER_EXPERT = re.compile(
    r"^(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)$"
)
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
# Options under which an adapter is more than its factors: key, and the values that change nothing.
_PLAIN_OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "monteclora_config": (None, {}),
    "kasa_config": (None, {}),
    "arrow_config": (None, {}),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
}
# Ways to begin that change the base model, unless PEFT converted the adapter when it was saved.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# The release of PEFT from which A of an expert layer's parameter multiplies the layer's inputs.
_EXPERTS_BY_INPUT = (0, 20)


@dataclass
class ImportedAdapter:
    """An adapter of PEFT on the modules of an MLX model, by their paths."""

    # lora_a, lora_b and, for DoRA, m.
    factors: dict[str, dict[str, mx.array]] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    dora: bool = False
    # The rows of new tokens, by path of a table of tokens.
    new_rows: dict[str, mx.array] = field(default_factory=dict)


def import_peft(model_path: str | Path, peft_path: str | Path, save_path: str | Path) -> ImportedAdapter:
    """Convert an adapter of PEFT for a checkpoint that MLX loads, and write it as deltatune and mlx-lm save theirs.

    The checkpoint is in Hugging Face's layout or MLX's, quantised or not. The folder may hold the adapter of a
    multi-token-prediction head in its folder `mtp`, beside another or alone; MLX's format has both in one. An adapter
    that is not LoRA or DoRA, has parts that MLX's format cannot express, or is for another model, is a UserError.
    """
    peft_path = Path(peft_path)
    path = locate(model_path)
    folders = [folder for folder in (peft_path, peft_path / MTP) if (folder / PEFT_CONFIG).is_file()] or [peft_path]
    read = {folder: _read(folder) for folder in folders}
    if any(".visual." in name for _, tensors in read.values() for name in tensors):
        model = load_vision_tower(path)
    else:
        model, _ = load_model(path, lazy=True)
    if peft_path / MTP in read:
        add_head(model, path)
    model_config = read_json(path / "config.json")
    parts = {folder: _converted(model, model_config, *both, folder) for folder, both in read.items()}
    for folder, part in parts.items():
        # PEFT has no dropout for experts, and MLX's format one for all.
        part.dropout = max(other.dropout for other in parts.values())
        _install(model, part, folder)
    imported = parts[folders[0]]
    for part in parts.values():
        imported.factors |= part.factors
    layers = layers_for_mlx_vlm(model)
    options: dict[str, Any] = {"model": str(model_path), LOADER: loader_of(model)}
    options |= {} if layers is None else {"num_layers": layers}
    save_adapters(model, save_path, options, named=layers is None)
    return imported


def _install(model: nn.Module, imported: ImportedAdapter, where: Path) -> None:
    both = imported.factors.keys() & imported.new_rows.keys()
    if both:
        raise UserError(
            f"adapter {where}: {min(both)} has new rows and a low-rank update, and an adapter of MLX has only one of "
            "them on a table. Merge it with PEFT (merge_and_unload) instead."
        )
    install_rows(model, imported.new_rows)
    made: dict[str, nn.Module] = {}
    for path, arrays in imported.factors.items():
        ranks = {path: arrays["lora_a"].shape[1]}
        adapter = make_adapters(model, ranks, imported.scales[path], imported.dropout, dora=imported.dora)[path]
        for name, value in arrays.items():
            if value.shape != adapter[name].shape:
                raise UserError(
                    f"adapter {where} is for another model: the {name} of {path} has shape {value.shape}, the model's "
                    f"is {adapter[name].shape}."
                )
            adapter[name] = value.astype(mx.float32)
        made[path] = adapter
    install_adapters(model, made)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Read the two files of a PEFT adapter. UserError where it is something else."""
    if not (folder / PEFT_CONFIG).is_file():
        hint = f"this is a file; give its folder, {folder.parent}" if folder.is_file() else f"no {PEFT_CONFIG} in it"
        raise UserError(f"adapter {folder}: {hint}; expected a folder that PEFT wrote.")
    config = read_json(folder / PEFT_CONFIG, "PEFT's adapter_config.json")
    if "peft_type" not in config:
        raise UserError(
            f"{folder / PEFT_CONFIG}: no peft_type in it; this is not an adapter of PEFT. MLX's needs no import."
        )
    if config["peft_type"] != "LORA":
        raise UserError(f"{folder / PEFT_CONFIG}: peft_type {config['peft_type']!r}; only LORA can be imported.")
    for key, plain in _PLAIN_OPTIONS.items():
        if config.get(key) not in plain:
            raise UserError(
                f"{folder / PEFT_CONFIG}: {key} is {config[key]!r}, which an adapter of MLX cannot express. Merge it "
                "with PEFT (merge_and_unload) instead."
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASES):
        raise UserError(
            f"{folder / PEFT_CONFIG}: init_lora_weights {start!r} changes the base model too. Save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA."
        )
    if not (folder / PEFT_WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(f"adapter {folder}: adapter_model.bin can run code when it is opened; save it as safetensors.")
    return config, read_weights(folder / PEFT_WEIGHTS)


def _converted(
    model: nn.Module,
    model_config: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    where: Path,
) -> ImportedAdapter:
    """Convert the tensors of a PEFT adapter to factors by paths of MLX.

    `model_config` is the content of the checkpoint's config.json, `config` that of PEFT's adapter_config.json.
    """
    modules = dict(model.named_modules())
    places = TransformersNames(dict(model_config)).places(
        path for path, module in modules.items() if "weight" in module
    )
    left = dict(tensors)
    new_rows = take_rows(left, config, places, modules, where)
    collected = _Gathered(config, places, modules)
    for module, leaves in _by_module(left, where).items():
        collected.add(module, leaves)
    collected.join_single_experts()
    if collected.strangers:
        raise UserError(
            f"adapter {where} is for another model, or on modules that MLX has no adapter for: no place for "
            f"{first_few(collected.strangers, separator=', ')}."
        )
    collected.settle_head(where)
    dropout = float(config.get("lora_dropout") or 0.0)
    return ImportedAdapter(collected.factors, collected.scales, dropout, bool(config.get("use_dora")), new_rows)


def _by_module(tensors: Mapping[str, mx.array], where: Path) -> dict[str, dict[str, mx.array]]:
    """{module: {A, B and m of its adapter}}. UserError for tensors that are no part of LoRA or DoRA."""
    by_module: dict[str, dict[str, mx.array]] = {}
    for name, value in tensors.items():
        match = _TENSOR.match(name)
        if match is None:
            raise UserError(f"adapter {where}: {name} is no tensor of LoRA or DoRA, and MLX has no place for it.")
        leaf = f"embedding_{match['embedding']}" if match["embedding"] else match["leaf"].removeprefix("lora_")
        by_module.setdefault(match["module"], {})[leaf] = value
    for module, leaves in by_module.items():
        if leaves.keys() - {"magnitude_vector"} not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise UserError(f"adapter {where}: of {module} it has only {', '.join(sorted(leaves))}.")
    return by_module


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern of PEFT's is the end of a path; UserError where it is none."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error as error:
        raise UserError(
            f"the adapter's {PEFT_CONFIG}: alpha_pattern: {pattern!r} is no regular expression ({error}); correct it."
        ) from error


class _Gathered:
    def __init__(self, config: Mapping[str, Any], places: Places, modules: Mapping[str, nn.Module]):
        self._config = config
        self._places = places
        self._modules = modules
        self.factors: dict[str, dict[str, mx.array]] = {}
        self.scales: dict[str, float] = {}
        # Modules of the adapter that the model has not.
        self.strangers: list[str] = []
        # {path of MLX: {expert: its factors}}, of layers with a module for each expert.
        self._single: dict[str, dict[int, Factors]] = {}
        self._head: dict[str, mx.array] | None = None

    def add(self, module: str, leaves: dict[str, mx.array]) -> None:
        """Add the adapter of one module of PEFT, or note that the model does not have it."""
        name = short(module.removeprefix("base_model.").removeprefix("model."))
        single = _PER_EXPERT.match(name)
        if single:
            self._add_single(name, single, leaves)
        elif name.removesuffix(".base_layer").endswith(".experts"):
            self._add_experts(name, leaves)
        elif name == "lm_head" and (name, None, None) not in self._places:
            self._head = leaves
        elif (path := self._places.get((name, None, None))) is None:
            self.strangers.append(module)
        else:
            a, b = (leaves[f"embedding_{factor}" if "embedding_A" in leaves else factor] for factor in "AB")
            self._set(path, a.T, b.T, self._scale(name, a.shape[0]))
            if "magnitude_vector" in leaves:
                self.factors[path]["m"] = leaves["magnitude_vector"].reshape(-1)

    def _set(self, path: str, a: mx.array, b: mx.array, scale: float) -> None:
        self.factors[path] = {"lora_a": a, "lora_b": b}
        self.scales[path] = scale

    def _scale(self, name: str, rank: int) -> float:
        """The factor of the update of the module or parameter `name`, by PEFT's rules."""
        alpha = self._config.get("lora_alpha")
        alpha = 8 if alpha is None else alpha
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            if _matches(pattern, f"model.language_model.{name}") or pattern == f"model.{name}":
                alpha = value
                break
        return alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank

    def _add_experts(self, name: str, leaves: dict[str, mx.array]) -> None:
        """Add the adapter of a parameter that holds the matrices of all experts."""
        module = name.removesuffix(".base_layer")
        parameter = self._parameter(module, name)
        halves = HALVES if parameter == "gate_up_proj" else (None,)
        paths = {half: self._places.get((module, parameter, half)) for half in halves}
        first = next(iter(paths.values()))
        if first is None:
            self.strangers.append(name)
            return
        matrix = self._modules[first]
        experts = matrix["weight"].shape[0]
        rows = matrix["weight"].shape[1] * len(halves)
        if leaves["A"].shape[0] % experts or leaves["B"].shape[1] % experts:
            self.strangers.append(f"{name} (not of {experts} experts)")
            return
        sizes = leaves["A"].shape[1], leaves["B"].shape[0]
        read = from_early_peft if self._from_early_peft(sizes, (input_size(matrix), rows)) else from_peft
        a, b = read(leaves["A"], leaves["B"], experts)
        scale = self._scale(f"{module}.{parameter}", a.shape[1])
        parts = split(a, b, HALVES) if len(halves) > 1 else {None: (a, b)}
        for half, (part_a, part_b) in parts.items():
            path = paths[half]
            assert path is not None
            self._set(path, part_a, part_b, scale)

    def _from_early_peft(self, shape: tuple[int, int], expected: tuple[int, int]) -> bool:
        """Whether factors of experts are those of PEFT before 0.20; (in, out) that differ say so by themselves.

        PEFT names its version from 0.18 on. A config without any of PEFT's own keys is an export of deltatune.
        """
        inputs, outputs = expected
        if inputs != outputs:
            return shape == (outputs, inputs)
        version = self._config.get("peft_version")
        if version is None:
            return "auto_mapping" in self._config
        try:
            return Version(str(version)).release < _EXPERTS_BY_INPUT
        except InvalidVersion as error:
            raise UserError(
                f"the adapter's {PEFT_CONFIG}: peft_version {version!r} is no version, and which axis of the experts "
                "the adapter reads depends on it; write the version of PEFT that saved it."
            ) from error

    def _parameter(self, module: str, name: str) -> str:
        """The parameter that the adapter `name` of an expert layer adapts: PEFT says so by nesting alone."""
        targets: Iterable[str] = self._config.get("target_parameters") or ()
        gated = (module, "gate_up_proj", HALVES[0]) in self._places
        first = "gate_up_proj" if gated else "up_proj"
        full = {parameter: f".{module}.{parameter}" for parameter in (first, "down_proj")}
        targeted = [p for p, path in full.items() if any(path.endswith(f".{short(target)}") for target in targets)]
        if len(targeted) == 1:
            return targeted[0]
        return first if name.endswith(".base_layer") else "down_proj"

    def _add_single(self, name: str, match: re.Match[str], leaves: dict[str, mx.array]) -> None:
        matrix = _MATRICES[match["matrix"]]
        module = re.sub(r"\.block_sparse_moe\.experts$", ".mlp.experts", match["module"])
        path = self._places.get((module, "gate_up_proj", matrix)) or self._places.get((module, f"{matrix}_proj", None))
        if path is None:
            self.strangers.append(name)
            return
        scale = self._scale(name, leaves["A"].shape[0])
        factors = leaves["A"], leaves["B"] * (scale / self.scales.setdefault(path, scale))
        self._single.setdefault(path, {})[int(match["expert"])] = factors

    def join_single_experts(self) -> None:
        """Stack the factors of single experts; one without an adapter, or of a lower rank, is padded with zeros."""
        for path, by_expert in self._single.items():
            experts = self._modules[path]["weight"].shape[0]
            if max(by_expert) >= experts:
                self.strangers.append(f"expert {max(by_expert)} of {path}, which has {experts}")
                continue
            rank = max(a.shape[0] for a, _ in by_expert.values())
            first_a, first_b = next(iter(by_expert.values()))
            nothing = mx.zeros((0, first_a.shape[1])), mx.zeros((first_b.shape[0], 0))
            stacked = [by_expert.get(expert, nothing) for expert in range(experts)]
            a = mx.stack([mx.pad(a, [(0, rank - a.shape[0]), (0, 0)]) for a, _ in stacked])
            b = mx.stack([mx.pad(b, [(0, 0), (0, rank - b.shape[1])]) for _, b in stacked])
            self.factors[path] = {"lora_a": a, "lora_b": b}

    def settle_head(self, where: Path) -> None:
        """Check that a tied head and its embedding have one update, since MLX knows no other form."""
        path = self._places.get(("embed_tokens", None, None))
        if any(name == "lm_head" for name, _, _ in self._places):
            return
        embedding = self.factors.get(path or "")
        head = self._head
        if embedding is None and head is None:
            return
        same = (
            embedding is not None
            and head is not None
            and mx.array_equal(head["A"], embedding["lora_b"]).item()
            and mx.array_equal(head["B"], embedding["lora_a"]).item()
            and self._scale("lm_head", head["A"].shape[0]) == self.scales[path or ""]
        )
        if not same and not (head is None and self._config.get("ensure_weight_tying")):
            raise UserError(
                f"adapter {where}: the model's head is tied to its embedding, and the adapter updates only one of "
                "them, or each in its own way. An adapter of MLX updates both alike: merge this one with PEFT instead."
            )
