"""Loads vision-language models through mlx-vlm, which models/load.py leaves to this file when images are to be read."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from .checkpoint_files import read_json

_BUILDING = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, FileNotFoundError)


def check_vision(config: dict[str, Any], path: Path, image: str) -> None:
    """UserError where a model cannot look at images: it has no vision tower, or mlx-vlm is not installed or too old."""
    if not config.get("vision_config"):
        raise UserError(
            f"{image}: has an image, and model {path} ({config.get('model_type')}) has no vision tower (no "
            "vision_config in its config.json); leave images out, or give a model with one."
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UserError(
            f"{image}: has an image, which needs mlx-vlm, and that is not installed: pip install 'deltatune[vision]'."
        )
    architecture(config)


def architecture(config: dict[str, Any]) -> Any:
    """mlx-vlm's module for a config. UserError where it knows none."""
    import mlx_vlm
    from mlx_vlm.utils import get_model_and_args

    try:
        return get_model_and_args(config)[0]
    except (ValueError, KeyError, ImportError) as error:
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
        model = module.Model(module.ModelConfig.from_dict(copy.deepcopy(config)))
    except _BUILDING as error:
        raise UserError(f"config.json: mlx-vlm cannot build a model from it: {reason(error)}") from error
    mx.eval(model.parameters())
    model.eval()
    return model


def load_image_processor(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    """What turns an image into patches. UserError where it cannot be had, and what to install where it needs more."""
    from mlx_vlm.utils import load_processor

    architecture(config)  # Its import tells transformers of mlx-vlm's own processors, which need no torch.
    files = ("preprocessor_config.json", "processor_config.json")
    if not any((path / name).is_file() for name in files):
        raise UserError(f"processor {path}: neither {files[0]} nor {files[1]} in it; copy the model's own.")
    try:
        processor = load_processor(path, add_detokenizer=False, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise UserError(f"processor {path}: {reason(error)}{_install(error)}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"processor {path}: cannot be loaded: {reason(error)}{_install(error)}") from error
    images = getattr(processor, "image_processor", None)
    if images is None:
        raise UserError(f"processor {path}: it has no image processor.")
    return images


def _install(error: BaseException) -> str:
    """Transformers says at length that a library is missing; what to do about it is one line."""
    wanted = [name for name in ("torchvision", "torch") if name in str(error).lower()]
    if not wanted:
        return ""
    return (
        " This processor needs PyTorch, which deltatune does not: pip install torch torchvision, or use a version of "
        "mlx-vlm that brings a processor of its own for this model (0.7 does for Qwen3-VL and Qwen3.5)."
    )


def reason(error: BaseException) -> str:
    """The error's words in one line."""
    text = " ".join(str(error).split())
    return f"missing key {text}" if isinstance(error, KeyError) else text[:400]


def chat_template(path: Path) -> str | None:
    """A chat template that stands in a file of its own, in the older format of processors."""
    file = path / "chat_template.json"
    if not file.is_file():
        return None
    template = read_json(file).get("chat_template")
    return template if isinstance(template, str) else None
