"""Translates the module paths of mlx-lm and mlx-vlm into those of transformers, by one record for each family.

A path of transformers is that of the class which config.json describes: with `text_config` the language model stands
under model.language_model, without it under model. PEFT compares the ends of paths, so the exported lists of modules
hold `short` paths, which end alike in both classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

_EXPERT = re.compile(r"^(?P<block>.+)\.switch_mlp\.(?:(?P<matrix>gate|up|down)_proj|(?P<layer>fc[12]))$")
# The parameters of experts without a gate.
_UNGATED = {"fc1": "up_proj", "fc2": "down_proj"}
_PREFIX = re.compile(
    r"^(?:base_model\.)?(?:model\.)*(?:language_model\.)?(?:model\.)?(?=(?:layers|embed_tokens|embeddings|lm_head)\b)"
)
_VISION_PREFIX = re.compile(r"^(?:model\.)*(?=visual\.)")
# Families without a record name their modules alike in mlx-lm and transformers if these are where causal models have
# them.
_PLAIN = re.compile(r"^(?:model\.layers\.\d+\..+|model\.embed_tokens|lm_head)$")


@dataclass(frozen=True)
class FamilyRecord:
    """How transformers names the modules of a family, and which of them PEFT takes in another way."""

    # Regular expressions and replacements that turn a path of mlx-lm or mlx-vlm into one of transformers.
    renames: tuple[tuple[str, str], ...] = ()
    # Whether the experts of a layer are two parameters of a module `experts`.
    experts: bool = False
    # Whether the router is a module of transformers' own, of which PEFT can adapt only the parameter `weight`.
    router: bool = False
    # Whether PEFT takes every gate_proj, up_proj or down_proj for the experts: each is then adapted as a parameter.
    redirected: bool = False
    # Whether PEFT refuses an adapter of a mixer's out_proj, which Mamba's kernels read without its module.
    mamba: bool = False
    # Options that mlx-lm multiplies into the matrices, in which transformers' adapters are not.
    multipliers: tuple[str, ...] = ()


_LANGUAGE_MODEL = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^vision_tower\.", "model.visual."),
)
_FORGET_GATE = (r"\.self_attn\.(f_proj|f_a_proj|f_b_proj)$", r".self_attn.forget_gate.\1")

RECORDS: dict[str, FamilyRecord] = {
    "qwen3_5": FamilyRecord(_LANGUAGE_MODEL),
    "qwen3_5_moe": FamilyRecord(_LANGUAGE_MODEL, experts=True, router=True),
    "qwen3_vl": FamilyRecord(_LANGUAGE_MODEL),
    "qwen3_vl_moe": FamilyRecord(_LANGUAGE_MODEL, experts=True, router=True),
    "qwen3_next": FamilyRecord(experts=True, router=True, redirected=True),
    "kimi_linear": FamilyRecord((_FORGET_GATE,), experts=True, router=True),
    "bailing_hybrid": FamilyRecord(
        (
            (r"^model\.word_embeddings$", "model.embed_tokens"),
            (r"\.attention\.", ".self_attn."),
            (r"\.self_attn\.dense$", ".self_attn.o_proj"),
            _FORGET_GATE,
        ),
        experts=True,
        router=True,
    ),
    "nemotron_h": FamilyRecord(((r"^backbone\.", "model."),), experts=True, mamba=True),
    "granitemoehybrid": FamilyRecord(((r"\.router\.layer$", ".router"),), experts=True, router=True),
    "mamba2": FamilyRecord(mamba=True),
    "falcon_h1": FamilyRecord(
        mamba=True,
        multipliers=(
            "attention_in_multiplier",
            "attention_out_multiplier",
            "mlp_multipliers",
            "ssm_in_multiplier",
            "ssm_multipliers",
            "ssm_out_multiplier",
        ),
    ),
    "olmo_hybrid": FamilyRecord(),
    "qwen3": FamilyRecord(),
    "gemma3_text": FamilyRecord(),
}


@dataclass(frozen=True)
class AdaptedPlace:
    """The module or parameter in transformers that an adapter of MLX adapts."""

    module: str
    # The parameter of that module, where PEFT adapts a parameter instead of the module.
    parameter: str | None = None
    # For an expert layer's `gate_up_proj`, which of its halves: "gate" or "up".
    matrix: str | None = None


# The path of MLX for (short path of a module, parameter of an expert layer, its half).
Places = dict[tuple[str, str | None, str | None], str]


class TransformersNames:
    """The names that transformers gives to the modules of the checkpoint with the config.json `config`."""

    def __init__(self, config: dict[str, Any]):
        self._model_type: str = config["model_type"]
        self._record = RECORDS.get(self._model_type.removesuffix("_text")) or RECORDS.get(self._model_type)
        self._nested = "text_config" in config
        self._multipliers = {
            name: config[name]
            for name in (self._record.multipliers if self._record else ())
            if set(np.atleast_1d(config.get(name) or 1.0)) != {1.0}
        }

    def place(self, path: str) -> AdaptedPlace:
        """Find the place of the module `path` of mlx-lm or mlx-vlm; a family whose names may differ is a UserError."""
        record = self._record
        expert = _EXPERT.match(path)
        if record is None and (expert or not _PLAIN.match(path)):
            known = ", ".join(RECORDS)
            raise UserError(
                f"{path}: deltatune does not know how transformers names this module of a {self._model_type} model "
                f"(it knows {known}). Merge the adapter instead: deltatune merge, or --to merged."
            )
        record = record or FamilyRecord()
        if expert and not record.experts:
            raise UserError(f"{path}: transformers has no experts in a {self._model_type} model; check --model.")
        if self._multipliers:
            raise UserError(
                f"{path}: mlx-lm multiplies the matrices of a {self._model_type} model by {self._multipliers}, and the "
                "adapter is for those products. Merge it instead: deltatune merge, or --to merged."
            )
        if expert and expert["layer"]:
            return AdaptedPlace(self._translate(expert["block"], record) + ".experts", _UNGATED[expert["layer"]])
        if expert:
            half = expert["matrix"] if expert["matrix"] != "down" else None
            parameter = "gate_up_proj" if half else "down_proj"
            return AdaptedPlace(self._translate(expert["block"], record) + ".experts", parameter, half)
        module = self._translate(path, record)
        if (record.router and module.endswith((".mlp.gate", ".router"))) or (
            record.redirected and module.endswith((".gate_proj", ".up_proj", ".down_proj"))
        ):
            return AdaptedPlace(module, "weight")
        return AdaptedPlace(module)

    def refused(self, modules: Iterable[str]) -> list[str]:
        """Return those of the exported modules for which PEFT refuses an adapter."""
        mamba = self._record is not None and self._record.mamba
        return [module for module in modules if mamba and module.endswith(".out_proj")]

    def places(self, paths: Iterable[str]) -> Places:
        """Return the places of the modules `paths`; those without one are left out."""
        by_name: Places = {}
        for path in paths:
            try:
                place = self.place(path)
            except UserError:
                continue
            parameter = place.parameter if place.parameter != "weight" else None
            by_name[short(place.module), parameter, place.matrix] = path
        return by_name

    def _translate(self, path: str, record: FamilyRecord) -> str:
        for pattern, replacement in record.renames:
            path = re.sub(pattern, replacement, path)
        return path if self._nested else path.replace("model.language_model.", "model.", 1)


def short(module: str) -> str:
    """The end of a transformers path by which PEFT finds the module in every class that has it."""
    return _PREFIX.sub("", _VISION_PREFIX.sub("", module, count=1), count=1)


def check_layout(names: Iterable[str], model_path: Path, purpose: str) -> None:
    """Refuse a checkpoint whose tensors have the names, or the quantised format, of a conversion to MLX.

    `purpose` is a clause on the reader that needs Hugging Face's names.
    """
    for name in names:
        if ".switch_mlp." in name or name.startswith(("language_model.model.", "vision_tower.")):
            kind = f"tensor {name} has a name that MLX gave it"
        elif name.endswith(".scales"):
            kind = f"tensor {name} belongs to MLX's quantisation"
        else:
            continue
        raise UserError(
            f"model {model_path}: {purpose}, and {kind}. Give the original checkpoint, from which this one was "
            "converted, as --model."
        )
