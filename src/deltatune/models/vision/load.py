"""Loads vision-language models through mlx-vlm, which models/load.py leaves to this file when images are to be read."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError, reason
from ..checkpoint_files import read_json

_BUILDING = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, FileNotFoundError)


def check_vision(config: dict[str, Any], path: Path, why: str) -> None:
    """UserError where a model cannot look at images, which `why` says are there: no vision tower, or no mlx-vlm."""
    if not config.get("vision_config"):
        raise UserError(
            f"{why}, and model {path} ({config.get('model_type')}) has no vision tower (no "
            "vision_config in its config.json); leave images out, or give a model with one."
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UserError(f"{why}, which needs mlx-vlm, and that is not installed: pip install 'deltatune[vision]'.")
    architecture(config)


def architecture(config: dict[str, Any]) -> Any:
    """mlx-vlm's module for a config. UserError where it knows none."""
    import mlx_vlm
    from mlx_vlm.utils import get_model_and_args

    try:
        return get_model_and_args(config)[0]
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(
            f"config.json: model_type {config.get('model_type')!r} is of a kind that mlx-vlm {mlx_vlm.__version__} "
            f"cannot load: {error}"
        ) from error


def load_vision_model(path: Path, config: dict[str, Any], checked: Any, lazy: bool) -> nn.Module:
    """mlx-vlm's model of a checkpoint folder. `checked(class)` gives the class that compares tensors as they load."""
    from mlx_vlm.utils import load_model

    module = architecture(config)
    original = module.Model
    module.Model = checked(original)
    try:
        model = load_model(path, lazy=lazy)
    except UserError:
        raise
    except _BUILDING as error:
        raise UserError(f"model {path}: mlx-vlm cannot build a model from its config.json: {reason(error)}") from error
    finally:
        module.Model = original
    model.__class__ = original
    return model


def new_vision_model(config: dict[str, Any], seed: int) -> nn.Module:
    """mlx-vlm's model with random weights drawn from `seed`."""
    module = architecture(config)
    mx.random.seed(seed)
    try:
        model = build(module, config)
    except _BUILDING as error:
        raise UserError(f"config.json: mlx-vlm cannot build a model from it: {reason(error)}") from error
    mx.eval(model.parameters())
    model.eval()
    return model


def build(module: Any, config: dict[str, Any]) -> nn.Module:
    """The model of one of mlx-vlm's modules; versions differ in who makes objects of the nested configs."""
    from mlx_vlm.utils import update_module_configs

    config = copy.deepcopy(config)
    return module.Model(update_module_configs(module.ModelConfig.from_dict(config), module, config, ["text", "vision"]))


def sanitizer(model: Any) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    """What mlx-vlm makes of a checkpoint's tensors, as a function of them that changes none of them.

    Upstream shifts norms in place. A tensor that is only renamed comes out as the very object that went in.
    """

    def all_of_it(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        for part in (model, model.vision_tower, model.language_model):
            weights = part.sanitize(weights) if hasattr(part, "sanitize") else weights
        return weights

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        blank = {name: mx.broadcast_to(mx.array(0.0), tensor.shape) for name, tensor in weights.items()}
        shifted = {name for name, tensor in all_of_it(blank).items() if mx.any(tensor != 0).item()}
        copies = {name: mx.array(tensor) for name, tensor in weights.items()}
        origin = {id(copy): weights[name] for name, copy in copies.items()}
        alive = list(copies.values())
        found = all_of_it(dict(copies))
        del alive
        return {name: value if name in shifted else origin.get(id(value), value) for name, value in found.items()}

    return sanitize


def load_processor(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    """The processor, with its `image_processor`. UserError where it cannot be had, and what to install where needed."""
    from mlx_vlm import utils

    architecture(config)  # Its import tells transformers of mlx-vlm's own processors, which need no torch.
    files = ("preprocessor_config.json", "processor_config.json")
    if not any((path / name).is_file() for name in files):
        raise UserError(f"processor {path}: neither {files[0]} nor {files[1]} in it; copy the model's own.")
    try:
        processor = utils.load_processor(
            path, eos_token_ids=config.get("eos_token_id"), trust_remote_code=trust_remote_code
        )
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"processor {path}: {needs_torch(error) or f'cannot be loaded: {reason(error)}'}") from error
    if getattr(processor, "image_processor", None) is None:
        raise UserError(f"processor {path}: it has no image processor.")
    return processor


def needs_torch(error: BaseException) -> str | None:
    """What to install, where a processor of transformers fails for want of PyTorch; its own text says so at length."""
    text = " ".join(str(error).split())
    if "torch" not in text.lower():
        return None
    first = text.split(". ")[0].rstrip(".")
    return (
        f"it needs PyTorch, which deltatune does not ({first}): pip install torch torchvision, "
        "or a version of mlx-vlm that brings a processor of its own for this model (0.7 does for Qwen3-VL and Qwen3.5)."
    )


def chat_template(path: Path) -> str | None:
    """A chat template that stands in a file of its own, in the older format of processors."""
    file = path / "chat_template.json"
    if not file.is_file():
        return None
    template = read_json(file).get("chat_template")
    return template if isinstance(template, str) else None
