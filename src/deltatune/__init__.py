"""deltatune fine-tunes hybrid gated-delta models with MLX.

Import it before mlx: it sets environment variables that MLX reads when it starts, and on Linux CPUs it loads a fast
BLAS, which MLX can only use if it is loaded first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .machine import startup as _startup
from .ops import IMPLEMENTATIONS as _IMPLEMENTATIONS

if TYPE_CHECKING:
    from .answering.dialogue import generate as generate
    from .commands.export import export_adapter as export_adapter
    from .data import load_datasets as load_datasets
    from .lora import convert_to_lora as convert_to_lora
    from .models.adapted_base import load as load
    from .models.checkpoint_writer import merge_checkpoint as merge_checkpoint
    from .ops.attention import attention as attention
    from .ops.gated_delta import gated_delta as gated_delta
    from .ops.linear_attention import linear_attention as linear_attention
    from .options.config import LoraConfig as LoraConfig
    from .options.config import TrainConfig as TrainConfig
    from .patches import patched as patched
    from .plan.planned_run import PlannedRun as PlannedRun
    from .plan.planned_run import finetune as finetune
    from .plan.planned_run import plan_run as plan_run
    from .train import Trainer as Trainer
    from .train.iterations import StopTraining as StopTraining

_startup.prepare(_IMPLEMENTATIONS)

# The module that defines each public name, relative to this package.
_MODULES = {
    "LoraConfig": "options.config",
    "PlannedRun": "plan.planned_run",
    "StopTraining": "train.iterations",
    "TrainConfig": "options.config",
    "Trainer": "train",
    "attention": "ops.attention",
    "convert_to_lora": "lora",
    "export_adapter": "commands.export",
    "finetune": "plan.planned_run",
    "gated_delta": "ops.gated_delta",
    "generate": "answering.dialogue",
    "linear_attention": "ops.linear_attention",
    "load": "models.adapted_base",
    "load_datasets": "data",
    "merge_checkpoint": "models.checkpoint_writer",
    "patched": "patches",
    "plan_run": "plan.planned_run",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import deltatune` alone stays quick."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
