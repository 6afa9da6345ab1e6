"""Writes an adapter in PEFT's format, for transformers, vLLM and llama.cpp (`deltatune export --to peft`).

Of experts, MLX has factors a [E, r, in] and b [E, out, r] for each of gate, up and down. PEFT's `target_parameters`
have A [E*r, in], expert by expert, and B [out, r*E], with the columns of all experts of one rank index side by side;
gate and up are one parameter of 2*out rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..lora import adapters, load_adapters
from ..lora.adapter import Adapter
from ..lora.adapter_files import read_config
from ..lora.select import MTP
from ..lora.tensor_files import write_tensors
from ..machine.host_memory import as_numpy
from ..machine.json_files import read_json
from ..models.adapted_base import load_base
from ..models.checkpoint_writer import unwritten_ends
from ..models.load import locate
from .module_names import AdaptedPlace, TransformersNames, short
from .new_token_rows import OPTION, to_peft_rows

# Factors a and b of one matrix, or of the experts' matrices.
Factors = tuple[mx.array, mx.array]
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
HALVES = ("gate", "up")
# The first PEFT that reads adapters of experts as they are written here (from_early_peft).
EXPERTS_SINCE = "0.20.0"
# PEFT's prefix of the path of a module.
_ROOT = "base_model.model"


@dataclass
class PeftAdapter:
    """An adapter in PEFT's terms: the content of its two files, and notes on differences in PEFT's behaviour."""

    tensors: dict[str, mx.array]
    config: dict[str, Any]
    notes: list[str]


def write_peft(
    model_path: str | Path,
    adapter_path: str | Path,
    save_path: str | Path,
    base_model: str | None = None,
    *,
    one_alpha: bool = False,
) -> PeftAdapter:
    """Convert an adapter to PEFT's format and write it to a folder, which must not hold an adapter yet.

    The checkpoint that was trained may be in Hugging Face's layout or MLX's, quantised or not; PEFT is to load the
    adapter on `base_model`, by default that checkpoint. Updates of a multi-token-prediction head, for which
    transformers has no class, are an adapter of their own in the folder `mtp` of that folder; it is returned where no
    other is. With `one_alpha`, for llama.cpp, they are left out, and lora_B is scaled in place of an `alpha_pattern`,
    which llama.cpp does not read. An adapter that PEFT cannot express is a UserError.
    """
    save_path = Path(save_path)
    of_head = save_path / MTP
    if any(save_path.glob(f"**/{PEFT_CONFIG}")):
        raise UserError(f"{save_path}: it holds an adapter already; give a new folder as --save-path.")
    path = locate(model_path)
    adapter_path = Path(adapter_path)
    if read_config(adapter_path).get("fine_tune_type") == "full":
        raise UserError(f"{adapter_path}: this model was trained without adapters; export it with --to merged.")
    model = load_base(path, adapter_path)
    load_adapters(model, adapter_path)
    parts = {save_path: model}
    if (head := model.pop(MTP, None)) is not None and not one_alpha:
        parts[of_head] = nn.Module()
        parts[of_head][MTP] = head
    if one_alpha:
        _give_one_alpha(list(adapters(model).values()))
    config, base = read_json(path / "config.json"), base_model or str(model_path)
    exported = {folder: to_peft_adapter(part, config, base) for folder, part in parts.items() if adapters(part)}
    if not exported:
        raise UserError(
            f"{adapter_path}: it updates the multi-token-prediction head alone, for which llama.cpp has no class; "
            "export it with --to merged."
        )
    if save_path in exported:
        _name_class(exported[save_path], config)
        if ends := unwritten_ends(path):
            exported[save_path].notes.append(
                "The base's generation_config.json lacks an end token that its tokenizer names: give transformers' "
                f"generate eos_token_id={ends}."
            )
    first = next(iter(exported.values()))
    if of_head in exported:
        first.notes.append(
            f"The updates of the multi-token-prediction head are the adapter in the folder {MTP}, since transformers "
            "has no class for the head. deltatune import reads it too; deltatune merge writes a whole model with it."
        )
    for folder, adapter in exported.items():
        _write(folder, adapter)
    return first


def _write(folder: Path, adapter: PeftAdapter) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / PEFT_WEIGHTS, adapter.tensors, {"format": "pt"})
        text = json.dumps(adapter.config, indent=2, sort_keys=True)
        (folder / PEFT_CONFIG).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: the adapter cannot be written ({error.strerror}).") from error


def _give_one_alpha(adapters: list[Any]) -> None:
    """Give adapters of all ranks scales of which PEFT's alpha, scale times rank, is the same; their updates stay."""
    for adapter in adapters:
        scale = adapters[0].scale * adapters[0].rank / adapter.rank
        if scale != adapter.scale and isinstance(adapter, Adapter):
            adapter.lora_b = adapter.lora_b * (adapter.scale / scale)
            adapter.scale = scale


def to_peft_adapter(model: nn.Module, config: Mapping[str, Any], base_model: str) -> PeftAdapter:
    """Convert the adapters on `model`, for the base that PEFT loads from `base_model`.

    `config` is the content of the checkpoint's config.json. An adapter that PEFT cannot express is a UserError.
    """
    names = TransformersNames(dict(config))
    exported = _Collected()
    tied = not any(path.rpartition(".")[2] == "lm_head" for path, _ in model.named_modules())
    experts: dict[str, dict[str, Adapter]] = {}
    for path, adapter in adapters(model).items():
        if not isinstance(adapter, Adapter):
            raise UserError(f"{path}: an adapter of {type(adapter.linear).__name__} has no form in PEFT; merge it.")
        place = names.place(path)
        if adapter["lora_a"].ndim == 3:
            experts.setdefault(f"{place.module}.{place.parameter}", {})[place.matrix or ""] = adapter
        elif adapter.base_name == "embedding":
            exported.add_embedding(path, place, adapter, tied)
        else:
            exported.add_linear(path, place, adapter)
    for target, matrices in experts.items():
        # PEFT wraps an adapted down_proj around it.
        module, _, parameter = target.rpartition(".")
        nested = parameter != "down_proj" and f"{module}.down_proj" in experts
        exported.add_experts(target, matrices, nested)
    tensors, exported.new_rows, notes = to_peft_rows(model, names, _ROOT)
    exported.tensors |= tensors
    exported.notes += notes
    first = next(iter(adapters(model).values()))
    if refused := names.refused(exported.modules):
        exported.notes.append(
            f"PEFT refuses this adapter, since Mamba's kernels read {refused[0]} without its module; other readers of "
            'the format may take it. For PEFT, train with lora_parameters exclude ["*.out_proj"], or merge the adapter.'
        )
    return exported.finish(first, base_model)


def _name_class(adapter: PeftAdapter, config: Mapping[str, Any]) -> None:
    """Say for a checkpoint with a vision tower which class of transformers has the names that the adapter uses.

    AutoModelForCausalLM makes a model of the language part alone, with other names, and PEFT then loads nothing and
    only warns. PEFT's own Auto classes take the class of `auto_mapping` where no task is given.
    """
    architecture = (config.get("architectures") or [None])[0]
    family = config["model_type"]
    if "text_config" not in config or architecture is None:
        return
    library = f"transformers.models.{family}.modeling_{family}"
    adapter.config["task_type"] = None
    adapter.config["auto_mapping"] = {"base_model_class": architecture, "parent_library": library}
    adapter.notes.append(
        f"The adapter is for {architecture}: load it with peft.AutoPeftModelForCausalLM, or with PeftModel on a model "
        "of AutoModelForImageTextToText. On a model of AutoModelForCausalLM, whose modules have other names, PEFT "
        "would load nothing of it and only warn."
    )


class _Collected:
    """Collects tensors, and the rank and scale of everything that PEFT is to adapt."""

    def __init__(self) -> None:
        self.tensors: dict[str, mx.array] = {}
        # {short path: (rank, scale)}, of modules and of parameters.
        self.modules: dict[str, tuple[int, float]] = {}
        self.parameters: dict[str, tuple[int, float]] = {}
        # {short path of a table of tokens: the indices of its new rows}
        self.new_rows: dict[str, list[int]] = {}
        self.notes: list[str] = []

    def add_linear(self, path: str, place: AdaptedPlace, adapter: Adapter) -> None:
        root = f"{_ROOT}.{place.module}"
        self.tensors[f"{root}.lora_A.weight"] = adapter["lora_a"].T
        self.tensors[f"{root}.lora_B.weight"] = adapter["lora_b"].T
        if place.parameter is None:
            self.modules[short(place.module)] = adapter.rank, adapter.scale
        else:
            self.parameters[f"{short(place.module)}.{place.parameter}"] = adapter.rank, adapter.scale
        if "m" in adapter:
            if place.parameter is not None:
                raise UserError(
                    f"{path}: PEFT can adapt this module of the family only as a parameter, for which it has no DoRA. "
                    "Merge the adapter, or train these modules with fine_tune_type lora."
                )
            self.tensors[f"{root}.lora_magnitude_vector"] = adapter["m"]

    def add_embedding(self, path: str, place: AdaptedPlace, adapter: Adapter, tied: bool) -> None:
        """Add an adapter of an embedding; where the head is tied to it, add the same update of the head."""
        if "m" in adapter:
            raise UserError(
                f"{path}: PEFT's DoRA scales the columns of an embedding, MLX's its rows, so neither can express the "
                "other. Merge the adapter, or leave embeddings out of DoRA."
            )
        root = f"{_ROOT}.{place.module}"
        self.tensors[f"{root}.lora_embedding_A"] = adapter["lora_a"].T
        self.tensors[f"{root}.lora_embedding_B"] = adapter["lora_b"].T
        self.modules[short(place.module)] = adapter.rank, adapter.scale
        if tied:
            self.tensors[f"{_ROOT}.lm_head.lora_A.weight"] = adapter["lora_b"]
            self.tensors[f"{_ROOT}.lm_head.lora_B.weight"] = adapter["lora_a"]
            self.modules["lm_head"] = adapter.rank, adapter.scale
            self.notes.append(
                "The output head is tied to the embedding, so the update is stored for both. PEFT's merge_and_unload "
                "would add it twice to the shared matrix: use deltatune merge for a merged model."
            )

    def add_experts(self, target: str, matrices: Mapping[str, Adapter], nested: bool) -> None:
        """Add the adapters of an expert layer's parameter `target`; `nested` where PEFT wraps another around it."""
        module = target.rpartition(".")[0]
        scale = next(iter(matrices.values())).scale
        factors: dict[str, Factors] = {}
        for name, adapter in matrices.items():
            factors[name] = adapter["lora_a"], adapter["lora_b"] * (adapter.scale / scale)
        a, b = factors[""] if "" in factors else fused(factors, HALVES)
        self.parameters[short(target)] = a.shape[1], scale
        root = f"{_ROOT}.{module}.base_layer" if nested else f"{_ROOT}.{module}"
        self.tensors[f"{root}.lora_A.weight"], self.tensors[f"{root}.lora_B.weight"] = to_peft(a, b)

    def finish(self, adapter: nn.Module, base_model: str) -> PeftAdapter:
        """Return everything with PEFT's config; `adapter` gives the dropout and the kind of all."""
        targets = {**self.modules, **self.parameters}
        (rank, scale), _ = Counter(targets.values()).most_common(1)[0]
        dropout = round(adapter.dropout_rate, 12)
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": _alpha(rank, scale),
            "lora_dropout": dropout,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_dora": getattr(adapter, "kind", "lora") == "dora",
            "use_rslora": False,
            "modules_to_save": None,
            "target_modules": list(self.modules),
            "rank_pattern": _patterns({name: rank_and_scale[0] for name, rank_and_scale in targets.items()}, rank),
            "alpha_pattern": _patterns(
                {name: _alpha(*rank_and_scale) for name, rank_and_scale in targets.items()}, _alpha(rank, scale)
            ),
        }
        if self.new_rows:
            config[OPTION] = self.new_rows
        if self.parameters:
            config["target_parameters"] = list(self.parameters)
            config["peft_version"] = EXPERTS_SINCE
            if dropout:
                config["lora_dropout"] = 0.0
                self.notes.append(f"PEFT has no dropout for parameters, so lora_dropout is 0 in place of {dropout}.")
        tensors = {name: mx.contiguous(value.astype(mx.float32)) for name, value in self.tensors.items()}
        return PeftAdapter(tensors, config, self.notes)


def _alpha(rank: int, scale: float) -> int | float:
    """PEFT's lora_alpha, which it divides by the rank: a whole number where it is one."""
    alpha = round(rank * scale, 9)
    return int(alpha) if alpha == int(alpha) else alpha


def _patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The values that differ from `default`, by the last two steps of a path, or by all where these do not agree."""
    by_end: dict[str, set[Any]] = {}
    for name, value in values.items():
        by_end.setdefault(".".join(name.split(".")[-2:]), set()).add(value)
    patterns = {}
    for name, value in values.items():
        end = ".".join(name.split(".")[-2:])
        if value != default:
            patterns[end if len(by_end[end]) == 1 else name] = value
    return patterns


def fused(parts: dict[str, Factors], halves: tuple[str, ...]) -> Factors:
    """Join the factors of several matrices into factors of the matrix that holds them one below the other.

    `parts` has (a [E, r, in], b [E, out, r]) by name, and `halves` the names in the order of the joint matrix, all of
    one number of rows; one that is missing has no adapter. Returns a [E, sum of r, in] and b [E, rows of all, sum of
    r], block-diagonal.
    """
    present = [name for name in halves if name in parts]
    experts, rows = parts[present[0]][1].shape[:2]
    ranks = {name: parts[name][1].shape[2] for name in present}
    a = mx.concatenate([parts[name][0] for name in present], axis=1)
    blocks = []
    for name in halves:
        row = [parts[name][1] if other == name else mx.zeros((experts, rows, ranks[other])) for other in present]
        blocks.append(mx.concatenate(row, axis=2))
    return a, mx.concatenate(blocks, axis=1)


def split(a: mx.array, b: mx.array, halves: tuple[str, ...]) -> dict[str, Factors]:
    """Take factors a [E, r, in] and b [E, rows of all parts, r] of a joint matrix apart: the inverse of `fused`.

    Every part keeps the whole rank, unless b is block-diagonal as `fused` makes it: then each keeps its own block. A
    part with b = 0, beside another with b != 0, has no adapter.
    """
    pieces = dict(zip(halves, mx.split(b, len(halves), axis=1), strict=True))
    used = {name: as_numpy(mx.any(piece != 0, axis=(0, 1))) for name, piece in pieces.items()}
    rank = b.shape[2]
    width = b.shape[2] // len(halves)
    spans = {name: slice(index * width, (index + 1) * width) for index, name in enumerate(halves)}
    diagonal = {name: used[name][spans[name]] for name in halves}
    if rank % len(halves) == 0 and all(
        diagonal[name].any() and diagonal[name].sum() == used[name].sum() for name in halves
    ):
        return {name: (a[:, spans[name]], pieces[name][:, :, spans[name]]) for name in halves}
    trained = [name for name in halves if used[name].any()] or list(halves)
    return {name: (a, pieces[name]) for name in trained}


def to_peft(a: mx.array, b: mx.array) -> Factors:
    """Turn a [E, r, in] and b [E, out, r] into PEFT's A [E*r, in] and B [out, r*E]."""
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def from_peft(a: mx.array, b: mx.array, experts: int) -> Factors:
    """Turn PEFT's A [E*r, in] and B [out, r*E] into a [E, r, in] and b [E, out, r]."""
    return a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)


def from_early_peft(a: mx.array, b: mx.array, experts: int) -> Factors:
    """Turn A [E*r, out] and B [in, r*E] of PEFT before 0.20 into a [E, r, in] and b [E, out, r].

    Those versions take the axes of a parameter [E, out, in] for (E, in, out), so that A stands on the output's side.
    """
    side_of_output, side_of_input = from_peft(a, b, experts)
    return side_of_input.swapaxes(1, 2), side_of_output.swapaxes(1, 2)
