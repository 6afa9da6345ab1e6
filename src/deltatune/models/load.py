"""Loads a model, its tokenizer and its config through mlx-lm, with a message for everything that can be wrong.

Upstream's loaders do the loading. Before them, the folder is checked, so that nothing in it runs unless asked for;
between them, tensors are compared with what the model expects, all of them, not just up to the first that differs.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import mlx_lm.utils
from mlx.utils import tree_flatten

from ..errors import UserError, first_line, reason
from ..machine import backend
from ..patches.tables.loading import without_gaps
from .checkpoint_files import check_config, check_tokenizer, read_json, weight_headers
from .vision import load as vision_load

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 4


@dataclass
class Loaded:
    """A model in inference mode, mlx-lm's tokenizer wrapper, the config as mlx-lm completed it, the folder.

    processor: mlx-vlm's, which cuts images into patches, where the model was loaded to look at some.
    """

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    path: Path
    processor: Any = None


def load(
    path_or_name: str | Path,
    *,
    trust_remote_code: bool = False,
    lazy: bool = False,
    from_scratch: bool = False,
    seed: int = 0,
    image: str | None = None,
) -> Loaded:
    """The model in a folder, or of a name on the Hugging Face hub, with its tokenizer.

    `lazy` leaves weights on the disk until they are used. `from_scratch` draws them anew from `seed`: config and
    tokenizer are all that the folder needs. `image` says where the first image stands that the model must look at (file
    and line): it is then loaded through mlx-vlm, vision tower and image processor included. UserError, one message, for
    whatever does not fit.
    """
    path = locate(path_or_name)
    if image is not None:
        return _load_vision(path, trust_remote_code, lazy, seed if from_scratch else None, image)
    config = read_config(path, trust_remote_code)
    check_tokenizer(path)
    if from_scratch:
        model = new_model(config, seed)
    else:
        model, config = load_model(path, trust_remote_code=trust_remote_code, lazy=lazy)
    tokenizer = load_tokenizer(path, config, trust_remote_code=trust_remote_code)
    return Loaded(model, tokenizer, config, path)


def _load_vision(path: Path, trust_remote_code: bool, lazy: bool, seed: int | None, image: str) -> Loaded:
    """`seed`: where weights are to be drawn, not read."""
    config = _plain_config(path, trust_remote_code)
    vision_load.check_vision(config, path, f"{image}: has an image")
    check_tokenizer(path)
    if seed is not None:
        model = vision_load.new_vision_model(config, seed)
    else:
        weight_headers(path)
        model = vision_load.load_vision_model(path, config, lambda kind: _checked(kind, path), lazy)
    tokenizer = load_tokenizer(path, config, trust_remote_code=trust_remote_code)
    template = vision_load.chat_template(path)
    if template is not None and not tokenizer.has_chat_template:
        tokenizer.chat_template, tokenizer.has_chat_template = template, True
    processor = vision_load.load_processor(path, config, trust_remote_code)
    return Loaded(model, tokenizer, config, path, processor)


def load_vision_tower(path: Path, why: str = "the adapter is for a vision tower") -> nn.Module:
    """mlx-vlm's model of a checkpoint, weights on the disk until they are used. `why`: what needs it, for errors."""
    config = _plain_config(path, trust_remote_code=False)
    vision_load.check_vision(config, path, why)
    weight_headers(path)
    return vision_load.load_vision_model(path, config, lambda kind: _checked(kind, path), lazy=True)


def to_train_on(path: Path) -> tuple[dict[str, nn.Module], list[str]]:
    """The models of a checkpoint by what they train on, `text` through mlx-lm and `images` through mlx-vlm, and a
    sentence for each of the two that cannot be had. Weights stay on the disk. UserError where neither can."""
    models: dict[str, nn.Module] = {}
    left_out: list[UserError] = []
    if _plain_config(path, trust_remote_code=False).get("vision_config"):
        try:
            models["images"] = load_vision_tower(path, "its config.json has a vision tower")
        except UserError as error:
            left_out.append(error)
    try:
        models["text"] = load_model(path, lazy=True)[0]
    except UserError as error:
        left_out.append(error)
    if not models:
        raise left_out[-1]
    return models, [str(error) for error in left_out]


def locate(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint: `path_or_name` itself, or its download from the hub. UserError where neither is."""
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model {path}: a file; expected the folder that holds config.json and model*.safetensors.")
    name = str(path_or_name)
    if isinstance(path_or_name, Path) or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise UserError(f"model {name}: no such directory, and not a hub name of the form owner/model.")
    try:
        return Path(mlx_lm.utils._download(name))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {name}: no such directory, and not to be had from the hub: {first_line(error)}"
        ) from error


def read_config(path: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """config.json as mlx-lm reads it. UserError for an unknown model type and for names that lead out of the folder."""
    config = _plain_config(path, trust_remote_code)
    if not config.get("model_file"):
        _classes(config)
    return config


def _plain_config(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise UserError(f"model {path}: no config.json in it; expected a checkpoint folder.")
    check_config(path, read_json(path / "config.json"), trust_remote_code)
    return mlx_lm.utils.load_config(path)


def load_model(path: Path, *, trust_remote_code: bool = False, lazy: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint folder and its config. UserError names missing, unknown and misshapen tensors."""
    read_config(path, trust_remote_code)
    weight_headers(path)
    checked: dict[type, type] = {}

    def classes(config: dict[str, Any]) -> tuple[type, Any]:
        model_class, arguments_class = _classes(config)
        checked[_checked(model_class, path)] = model_class
        return next(iter(checked)), arguments_class

    options: dict[str, Any] = {"lazy": lazy, "strict": True, "get_model_classes": classes}
    if "trust_remote_code" in inspect.signature(mlx_lm.utils.load_model).parameters:
        options["trust_remote_code"] = trust_remote_code
    try:
        model, config = mlx_lm.utils.load_model(path, **options)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, FileNotFoundError) as error:
        raise UserError(f"model {path}: mlx-lm cannot build a model from its config.json: {reason(error)}") from error
    model.__class__ = checked.get(type(model), type(model))
    return model, config


def load_tokenizer(path: Path, config: dict[str, Any], *, trust_remote_code: bool = False) -> Any:
    """mlx-lm's tokenizer wrapper for a checkpoint folder; chat templates are rendered in transformers' sandbox."""
    check_tokenizer(path)
    try:
        return mlx_lm.utils.load_tokenizer(
            path, {"trust_remote_code": trust_remote_code}, eos_token_ids=config.get("eos_token_id")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"tokenizer {path}: cannot be loaded: {reason(error)}{_trust_hint(error)}") from error
    except Exception as error:
        # The tokenizers package raises bare Exception for a file that it cannot parse; anything else is a defect.
        if type(error) is not Exception:
            raise
        raise UserError(f"tokenizer {path}: cannot be loaded: {reason(error)}") from error


def new_model(config: dict[str, Any] | str | Path, seed: int = 0) -> nn.Module:
    """A model with random weights, for training from scratch: from config.json's content, or from its folder.

    Weights follow from `seed`, which becomes MLX's random state.
    """
    if not isinstance(config, dict):
        config = read_config(locate(config))
    model_class, arguments_class = _classes(config)
    mx.random.seed(seed)
    try:
        model = model_class(arguments_class.from_dict(copy.deepcopy(config)))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"config.json: mlx-lm cannot build a model from it: {reason(error)}") from error
    mx.eval(model.parameters())
    model.eval()
    return model


def _classes(config: dict[str, Any]) -> tuple[type, Any]:
    model_type = config["model_type"]
    try:
        if not re.fullmatch(r"[\w-]+", model_type):
            raise ValueError(f"{model_type!r} is no name of a model")
        return mlx_lm.utils._get_classes(config)
    except (ValueError, AttributeError) as error:
        if _vision_only(config):
            message = "describes a vision encoder alone; give the folder of the whole model."
        else:
            known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
            close = difflib.get_close_matches(model_type, [*known, *mlx_lm.utils.MODEL_REMAPPING], n=1, cutoff=0.5)
            nearest = f"; the nearest that it knows is {close[0]!r}" if close else ""
            message = f"is of a kind that mlx-lm {mlx_lm.__version__} does not know{nearest}."
        raise UserError(f"config.json: model_type {model_type!r} {message}") from error


def _vision_only(config: dict[str, Any]) -> bool:
    return "vision" in config["model_type"].split("_") and "vocab_size" not in config and "text_config" not in config


def _checked(model_class: type, path: Path) -> type:
    """`model_class`, comparing every tensor before it loads them, and with a sanitize that says what it lacks."""

    def load_weights(self: nn.Module, weights: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
        _compare(path, dict(weights), tree_flatten(self.parameters(), destination={}))  # type: ignore[arg-type]
        if backend.device() == "cuda":
            weights = without_gaps(weights)
        return model_class.load_weights(self, weights, strict=strict)  # type: ignore[attr-defined]

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        try:
            return model_class.sanitize(self, weights)  # type: ignore[attr-defined]
        except KeyError as error:
            raise UserError(f"model {path}: tensor {error} is missing.") from error
        except (ValueError, IndexError) as error:
            raise UserError(f"model {path}: its tensors do not fit its config.json: {reason(error)}") from error

    body: dict[str, Any] = {"load_weights": load_weights}
    if hasattr(model_class, "sanitize"):
        body["sanitize"] = sanitize
    return type(model_class.__name__, (model_class,), body)


def _compare(path: Path, given: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    shapes = [
        f"{name} has shape {given[name].shape}, {expected[name].shape} expected"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    found = [
        f"{len(names)} {what} ({_some(names)})"
        for what, names in (("missing", missing), ("unknown to the model", extra), ("misshapen", shapes))
        if names
    ]
    if not found:
        return
    hint = ""
    if any(name.endswith(".scales") for name in extra):
        hint = " The weights are quantised, but config.json has no `quantization` for them."
    elif any(name.endswith(".scales") for name in missing):
        hint = " config.json says quantised, but the weights are not."
    raise UserError(f"model {path}: the tensors do not fit config.json: {'; '.join(found)}.{hint}")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _trust_hint(error: BaseException) -> str:
    return " (--trust-remote-code runs it)" if "trust_remote_code" in str(error) else ""
