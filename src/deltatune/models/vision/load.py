"""Loads vision-language models and their processors through mlx-vlm. models/load.py calls it if the data has images."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError, reason
from ...machine.json_files import read_json
from ..checkpoint_files import only_chosen
from ..transformers_configs import completed, refusing_config, with_joined_experts


def check_vision(config: dict[str, Any], path: Path, why: str) -> None:
    """Refuse a model without a vision tower, or that mlx-vlm does not know; `why` is a clause with which messages
    begin.
    """
    if not config.get("vision_config"):
        raise UserError(
            f"{why}, and model {path} ({config.get('model_type')}) has no vision tower (no "
            "vision_config in its config.json); leave the images out, or choose a model with a vision tower."
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UserError(f"{why}, which needs mlx-vlm, and mlx-vlm is not installed: pip install 'deltatune[vision]'.")
    architecture(config)


def architecture(config: dict[str, Any]) -> Any:
    """mlx-vlm's module for the model of a config. UserError if it has none."""
    import mlx_vlm
    from mlx_vlm.utils import get_model_and_args

    try:
        module = get_model_and_args(config)[0]
        if not hasattr(module, "Model"):
            raise ValueError(f"{module.__name__} is no model")
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(
            f"config.json: model_type {config.get('model_type')!r} is of a kind that mlx-vlm {mlx_vlm.__version__} "
            f"cannot load: {error}"
        ) from error
    return module


def load_vision_model(path: Path, config: dict[str, Any], checked: Any, lazy: bool) -> nn.Module:
    """Load the model of a checkpoint folder through mlx-vlm, of its own class.

    `checked` takes mlx-vlm's model class and returns a subclass that compares tensors as they are loaded. With `lazy`,
    weights stay on the disk until they are used.
    """
    from mlx_vlm.utils import load_model

    module = architecture(config)
    original = module.Model
    options = module.ModelConfig

    class Options(options):  # type: ignore[misc, valid-type]
        @classmethod
        def from_dict(cls, params: dict[str, Any]) -> Any:
            # mlx-vlm reads the text part from the same dictionary afterwards.
            params.update(completed(params))
            return options.from_dict(params)

    module.Model = checked(original)
    module.ModelConfig = Options
    refusing = refusing_config(f"model {path}: mlx-vlm cannot build a model from its config.json")
    try:
        with refusing, only_chosen(path) as folder:
            model = load_model(folder, lazy=lazy)
    finally:
        module.Model = original
        module.ModelConfig = options
    model.__class__ = original
    return model


def new_vision_model(config: dict[str, Any], seed: int, *, lazy: bool = False) -> nn.Module:
    """Build mlx-vlm's model with random weights from `seed`, drawn when they are used if `lazy`."""
    module = architecture(config)
    mx.random.seed(seed)
    with refusing_config("config.json: mlx-vlm cannot build a model from it"):
        model = build(module, config)
    if not lazy:
        mx.eval(model.parameters())
    model.eval()
    return model


def build(module: Any, config: dict[str, Any]) -> nn.Module:
    """Build the model of one of mlx-vlm's modules. In some versions the caller has to make the nested configs."""
    from mlx_vlm.utils import update_module_configs

    config = copy.deepcopy(completed(config))
    return module.Model(update_module_configs(module.ModelConfig.from_dict(config), module, config, ["text", "vision"]))


def sanitizer(model: Any) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    """Return one function of all the `sanitize` methods of an mlx-vlm model: {name in the files: tensor} -> {parameter:
    tensor}.

    Those methods may change tensors in place (upstream adds one to the weights of norms); this function never does. A
    tensor that is only renamed comes back as the same object.
    """

    def sanitize_all(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        for part in (model, model.vision_tower, model.language_model):
            weights = part.sanitize(weights) if hasattr(part, "sanitize") else weights
        return with_joined_experts(weights)

    @functools.cache
    def shifted() -> set[str]:
        """The parameters to which a constant is added; every call has tensors of the same names and shapes."""
        blank = {name: mx.broadcast_to(mx.array(0.0), shape) for name, shape in shapes.items()}
        return {name for name, tensor in sanitize_all(blank).items() if mx.any(tensor != 0).item()}

    shapes: dict[str, tuple[int, ...]] = {}

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        shapes.update({name: tensor.shape for name, tensor in weights.items()})
        copies = {name: mx.array(tensor) for name, tensor in weights.items()}
        # `copies` keeps every copy alive meanwhile, so no other array can get its id.
        origin = {id(copy): weights[name] for name, copy in copies.items()}
        result = sanitize_all(dict(copies))
        return {name: value if name in shifted() else origin.get(id(value), value) for name, value in result.items()}

    return sanitize


def load_processor(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    """Load a checkpoint's processor, with its `image_processor`, which cuts images into patches, through mlx-vlm."""
    from mlx_vlm import utils

    architecture(config)  # Imports the module, which registers mlx-vlm's processors; they need no torch.
    files = ("preprocessor_config.json", "processor_config.json")
    present = [name for name in (*files, "video_preprocessor_config.json") if (path / name).is_file()]
    if not set(files) & set(present):
        raise UserError(f"processor {path}: neither {files[0]} nor {files[1]} in it; copy the original model's.")
    for name in present:
        read_json(path / name)
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
    """Return the packages to install if `error` says that a processor needs PyTorch, in words; else None."""
    text = " ".join(str(error).split())
    if "torch" not in text.lower():
        return None
    first = text.split(". ")[0].rstrip(".")
    return (
        f"it needs PyTorch ({first}). Either pip install torch torchvision, or install a version of mlx-vlm that has a "
        "processor of its own for this model (0.7 has one for Qwen3-VL and Qwen3.5)."
    )
