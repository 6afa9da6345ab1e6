"""deltatune: fine-tune hybrid gated-delta models with MLX. Import it before mlx to get a fast BLAS on Linux CPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .machine import blas as _blas
from .machine import environment as _environment
from .machine import subnormals as _subnormals

if TYPE_CHECKING:
    from .config import LoraConfig, TrainConfig
    from .data import load_datasets
    from .lora import convert_to_lora
    from .models.load import load
    from .ops.gated_delta import gated_delta
    from .patches import patched
    from .train import Trainer

_environment.keep_full_fp32()
_environment.limit_queue()
_environment.see_own_gpu()
with _subnormals.flushed():
    _blas.load()
    _subnormals.start_mlx()

_HOMES = {
    "LoraConfig": "config",
    "TrainConfig": "config",
    "Trainer": "train",
    "convert_to_lora": "lora",
    "gated_delta": "ops.gated_delta",
    "load": "models.load",
    "load_datasets": "data",
    "patched": "patches",
}

__all__ = [
    "LoraConfig",
    "TrainConfig",
    "Trainer",
    "convert_to_lora",
    "gated_delta",
    "load",
    "load_datasets",
    "patched",
]


def __getattr__(name: str) -> Any:
    """Names are imported at first use: `import deltatune` alone stays quick, and loads the BLAS before mlx."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
