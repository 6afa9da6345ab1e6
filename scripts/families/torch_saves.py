"""Tiny checkpoints that transformers 5 itself writes, with drawn weights, and its own logits. Needs torch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from saved_families import REFUSED, SAVED
from tiny_sizes import HEADS, SIZES
from transformers import AutoConfig
from transformers.models.auto import configuration_auto, modeling_auto


def model_class(kind: str) -> type | None:
    """Return the class in which transformers loads text into a model of a type, or None where it has none."""
    name = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    name = name or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    return (
        getattr(transformers, name)
        if isinstance(name, str) and kind in configuration_auto.CONFIG_MAPPING_NAMES
        else None
    )


# What transformers' own classes need in another form than mlx-lm's, or not at all.
_UNSET = {
    "tie_word_embeddings",
    "partial_rotary_factor",
    "n_inner",
    "router_jitter_noise",
    "topk_method",
    "scoring_func",
}


_OWN = SAVED | REFUSED


def _fields(config_class: type, own: dict[str, Any]) -> dict[str, Any]:
    """Return the small sizes of the options that a class of transformers declares."""
    names = set(inspect.signature(config_class.__init__).parameters) | {
        name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {})
    }
    names -= _UNSET
    if "qk_rope_head_dim" in names:
        # Latent attention has a head of keys for each of queries; head_dim is that of its positions.
        names.discard("head_dim")
        own = {"num_key_value_heads": HEADS} | own
        own = {"head_dim": SIZES["qk_rope_head_dim"]} | own if hasattr(config_class, "head_dim") else own
    chosen = {name: value for name, value in SIZES.items() if name in names and value is not None}
    return chosen | {name: value for name, value in own.items() if name in names}


def config_of(kind: str) -> Any:
    """Return transformers' config object of a tiny model of a type."""
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    parts = {}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        part_class = part
        if part is AutoConfig:
            part_class = type(getattr(config_class(), name))
        parts[name] = {"model_type": part_class.model_type} | _fields(part_class, _OWN.get(part_class.model_type, {}))
    return config_class(**_fields(config_class, _OWN.get(kind, {})), **parts)


def draw(model: Any) -> None:
    """Draw every tensor, so that no norm or bias is constant."""
    generator = torch.Generator().manual_seed(0)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if tensor.ndim < 2:
                tensor += 0.1 * noise
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def save(case: str, folder: Path, **options: Any) -> Any:
    """Let transformers save the tiny model of a case of SAVED, with `options` set in its config; return the model."""
    kind = case.split()[0]
    config = config_of(kind)
    for name, value in (SAVED.get(case, {}) | options).items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    # Parameters that start constant keep what their class draws.
    torch.manual_seed(0)
    model = model_class(kind)(config).float().eval()
    draw(model)
    model.save_pretrained(folder)
    return model


def logits(model: Any, rows: np.ndarray) -> np.ndarray:
    """Return the logits of transformers' model."""
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(rows), use_cache=False).logits.float().numpy()
