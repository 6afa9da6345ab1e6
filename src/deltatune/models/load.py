"""Loads a model, its tokenizer and its config through mlx-lm, with one clear message for every mistake in the files.

The loaders of mlx-lm and mlx-vlm do the loading. Before they run, the folder is checked, so that no code in it runs
unless the user allows it. While they run, every tensor is compared with the model's parameter, so that the message
names all that do not fit, not only the first.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import mlx_lm.utils
from huggingface_hub.errors import StrictDataclassError

from .. import upstream
from ..errors import UserError, first_few, first_line, reason
from ..machine import backend
from ..machine.environment import expanded
from ..machine.json_files import read_json
from ..ops.experts.tiles import needs_whole_matrices
from ..ops.functional import arrays_of, is_floating
from ..ops.random_state import drawing_from
from ..options.values import refuse_address
from ..patches import left_alone_for, refuse
from ..patches.tables.products import without_gaps
from .checkpoint_files import (
    check_config,
    check_dense,
    check_tokenizer,
    only_chosen,
    processor_template,
    weight_headers,
)
from .known_faults import check_scaling, set_yarn
from .transformers_configs import (
    BUILD_ERRORS,
    check_options,
    completed,
    refusing_config,
    with_joined_experts,
    with_known_type,
    with_released_names,
)

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Loaded:
    """A loaded checkpoint.

    Attributes:
        model: The model, in inference mode.
        tokenizer: mlx-lm's wrapper of the tokenizer.
        config: The content of config.json, as mlx-lm completes it.
        path: The checkpoint folder.
        processor: mlx-vlm's processor, which cuts images into patches. None unless the model was loaded for images.
    """

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    path: Path
    processor: Any = None


def load(
    path_or_name: str | Path | None,
    *,
    trust_remote_code: bool = False,
    lazy: bool = False,
    from_scratch: bool = False,
    seed: int = 0,
    image: str | None = None,
) -> Loaded:
    """Load a model and its tokenizer from a folder or from the Hugging Face hub (owner/model).

    With `lazy`, weights stay on the disk, or undrawn, until they are used. From scratch, weights are drawn with `seed`,
    and the folder needs only config and tokenizer. With `image`, the file and line of the first image in the data,
    which messages quote, mlx-vlm loads the model with its vision tower and image processor. UserError for a checkpoint
    that is missing, damaged, of an unknown kind, or would run code.
    """
    backend.limit_records()
    path = locate(path_or_name)
    if from_scratch:
        check_dense(path)
    if image is None:
        config = read_config(path, trust_remote_code)
    else:
        config = vision_config(path, f"{image}: has an image", trust_remote_code)
    check_tokenizer(path)
    if from_scratch:
        model = new_model(config, seed, lazy=lazy, vision=image is not None)
    elif image is None:
        model, config = load_model(path, trust_remote_code=trust_remote_code, lazy=lazy)
    else:
        model = load_vision_model(path, config, lazy)
    tokenizer = load_tokenizer(path, config, trust_remote_code=trust_remote_code)
    processor = None if image is None else load_processor(path, config, trust_remote_code)
    return Loaded(model, tokenizer, config, path, processor)


def vision_config(path: Path, why: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Read config.json of a model with a vision tower that mlx-vlm knows; else UserError, which begins with `why`."""
    config = plain_config(path, trust_remote_code)
    if not config.get("vision_config"):
        raise UserError(
            f"{why}, and model {path} ({config.get('model_type')}) has no vision tower (no "
            "vision_config in its config.json); leave the images out, or choose a model with a vision tower."
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UserError(f"{why}, which needs mlx-vlm, and mlx-vlm is not installed: pip install 'deltatune[vision]'.")
    architecture(config)
    return config


def load_vision_model(path: Path, config: dict[str, Any], lazy: bool) -> nn.Module:
    """Load the model of a checkpoint folder through mlx-vlm. With `lazy`, weights stay on the disk until used."""
    from mlx_vlm import utils

    weight_headers(path)
    module = architecture(config)
    original = module.Model
    options = module.ModelConfig

    class Options(options):  # type: ignore[misc, valid-type]
        @classmethod
        def from_dict(cls, params: dict[str, Any]) -> Any:
            # mlx-vlm reads the text part from the same dictionary afterwards.
            params.update(completed(params))
            return options.from_dict(params)

    module.Model = checked(original, path)
    module.ModelConfig = Options
    refusing = refusing_config(f"model {path}: mlx-vlm cannot build a model from its config.json")
    try:
        with refusing, only_chosen(path) as folder:
            model = utils.load_model(folder, lazy=lazy)
    finally:
        module.Model = original
        module.ModelConfig = options
    model.__class__ = original
    return model


def load_vision_tower(path: Path, why: str = "the adapter is for a vision tower") -> nn.Module:
    """Load a checkpoint's model through mlx-vlm, lazily; messages begin with `why`, a clause with the reason."""
    return load_vision_model(path, vision_config(path, why), lazy=True)


def load_for_data(path: Path) -> tuple[dict[str, nn.Module], list[str]]:
    """Load a checkpoint lazily for each kind of data: `text` through mlx-lm and `images` through mlx-vlm.

    It returns the models by kind, and a message for each kind that cannot be loaded; UserError if neither can.
    """
    models: dict[str, nn.Module] = {}
    errors: list[UserError] = []
    loaders: dict[str, Callable[[], nn.Module]] = {"text": lambda: load_model(path, lazy=True)[0]}
    if plain_config(path, trust_remote_code=False).get("vision_config"):
        loaders = {"images": lambda: load_vision_tower(path, "its config.json has a vision tower")} | loaders
    for data, load_it in loaders.items():
        try:
            models[data] = load_it()
        except UserError as error:
            errors.append(error)
    if not models:
        raise errors[-1]
    return models, [str(error) for error in errors]


def locate(path_or_name: str | Path | None) -> Path:
    """Find the folder of a checkpoint, downloading it from the hub if `path_or_name` is a hub name."""
    if path_or_name is None:
        raise UserError("model: expected the folder of a model, or its name on the Hugging Face hub; got none.")
    path = expanded(path_or_name)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model {path}: this is a file; expected the folder of config.json and model*.safetensors.")
    name = str(path_or_name)
    refuse_address(name, f"model {name}")
    if isinstance(path_or_name, Path) or not _may_be_hub_name(name):
        raise UserError(f"model {name}: no such directory, and not a hub name of the form owner/model.")
    try:
        return upstream.download(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {name}: no such directory, and it cannot be downloaded from the hub: {first_line(error)}"
        ) from error


def comes_from_hub(path_or_name: str | Path | None) -> bool:
    """Return whether locate() would ask the hub, and so might download gigabytes."""
    return isinstance(path_or_name, str) and _may_be_hub_name(path_or_name) and not Path(path_or_name).exists()


def _may_be_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not name.startswith(".")


def read_config(path: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Read config.json as mlx-lm does, and refuse it as check_config() does, or for a model type that mlx-lm does not
    know.
    """
    config = plain_config(path, trust_remote_code)
    if not config.get("model_file"):
        _classes(config)
    return config


def plain_config(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    """config.json after the checks that hold for models of mlx-lm and of mlx-vlm alike."""
    if not (path / "config.json").is_file():
        adapter = "it holds an adapter; give it as --adapter-path, and its base here"
        hint = adapter if (path / "adapter_config.json").is_file() else "expected the folder of a checkpoint"
        raise UserError(f"model {path}: no config.json in it; {hint}.")
    check_config(path, read_json(path / "config.json"), trust_remote_code)
    if (path / "generation_config.json").is_file():
        read_json(path / "generation_config.json")
    return mlx_lm.utils.load_config(path)


def load_model(path: Path, *, trust_remote_code: bool = False, lazy: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model of a checkpoint folder through mlx-lm, in inference mode, and its config as mlx-lm completes it.

    UserError names the tensors that are missing, unknown or misshapen. With `lazy`, weights stay on the disk until they
    are used.
    """
    config = read_config(path, trust_remote_code)
    weight_headers(path)
    refusal = f"model {path}: mlx-lm cannot build a model from its config.json"
    with refusing_config(refusal):
        complete = completed(config)
        if not config.get("model_file"):
            check_options(config)
            check_scaling(complete, _built)

    def classes(config: dict[str, Any]) -> tuple[type, Any]:
        model_class, arguments_class = _classes(config)
        return checked(model_class, path), arguments_class

    with refusing_config(refusal), only_chosen(path) as folder:
        model, loaded_config = mlx_lm.utils.load_model(
            folder, lazy, model_config=complete, get_model_classes=classes, trust_remote_code=trust_remote_code
        )
        if not config.get("model_file"):
            model.__class__ = type(model).__mro__[1]
        set_yarn(config, model)
    # Without the options that completed() adds, so that a run from any version of deltatune can be continued.
    changed = {key: value for key, value in loaded_config.items() if key not in complete or value != complete[key]}
    return model, config | changed


def load_tokenizer(path: Path, config: dict[str, Any], *, trust_remote_code: bool = False) -> Any:
    """Load a folder's tokenizer through mlx-lm, in its wrapper; `config` has the end-of-sequence tokens of the model.

    Transformers renders its chat template in a sandbox. Older processors keep the chat template in chat_template.json
    alone, where transformers' tokenizers do not look.
    """
    check_tokenizer(path)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if (template := processor_template(path)) is not None:
        options["chat_template"] = template
    try:
        return mlx_lm.utils.load_tokenizer(path, options, eos_token_ids=config.get("eos_token_id"))
    except StrictDataclassError as error:
        raise UserError(f"config {path / 'config.json'}: transformers refuses it: {reason(error)}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        hint = " (--trust-remote-code runs it)" if "trust_remote_code" in str(error) else ""
        raise UserError(f"tokenizer {path}: cannot be loaded: {reason(error)}{hint}") from error
    except Exception as error:
        # The tokenizers package raises Exception itself for a file that it cannot parse. Subclasses are defects.
        if type(error) is not Exception:
            raise
        raise UserError(f"tokenizer {path}: cannot be loaded: {reason(error)}") from error


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


def new_model(
    config: dict[str, Any] | str | Path, seed: int = 0, *, lazy: bool = False, vision: bool = False
) -> nn.Module:
    """Build a model with random weights, in inference mode, of a config's content or of the checkpoint that holds it.

    `seed` seeds MLX's global random state, from which the weights are drawn, when they are used if `lazy`. The model is
    mlx-vlm's with its tower for `vision`, else mlx-lm's.
    """
    if not isinstance(config, dict):
        config = read_config(locate(config))
    (architecture if vision else _classes)(config)
    with refusing_config(f"config.json: {'mlx-vlm' if vision else 'mlx-lm'} cannot build a model from it"):
        complete = completed(config)
        if not vision:
            check_options(config)
            check_scaling(complete, _built)
        mx.random.seed(seed)
        model = (build_vision if vision else _built)(complete)
        if not vision:
            set_yarn(config, model)
    if not lazy:
        mx.eval(model.parameters())
    model.eval()
    return model


def _built(complete: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model of a completed config, with random weights."""
    model_class, arguments_class = _classes(dict(complete))
    return model_class(arguments_class.from_dict(copy.deepcopy(dict(complete))))


def build_vision(complete: Mapping[str, Any]) -> nn.Module:
    """Build mlx-vlm's model of a completed config. In some versions the caller has to make the nested configs."""
    from mlx_vlm.utils import update_module_configs

    module = architecture(dict(complete))
    config = copy.deepcopy(dict(complete))
    return module.Model(update_module_configs(module.ModelConfig.from_dict(config), module, config, ["text", "vision"]))


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


def _classes(config: dict[str, Any]) -> tuple[type, Any]:
    """mlx-lm's classes of the model and of its arguments. UserError for a model type that it does not know."""
    model_type = config["model_type"]
    try:
        if not re.fullmatch(r"[\w-]+", model_type):
            raise ValueError(f"{model_type!r} is no name of a model")
        return upstream.model_classes(with_known_type(config))
    except (ValueError, AttributeError) as error:
        if "vision" in model_type.split("_") and "vocab_size" not in config and "text_config" not in config:
            message = "is that of a vision encoder alone; give the folder of the whole model."
        else:
            known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
            close = difflib.get_close_matches(model_type, [*known, *mlx_lm.utils.MODEL_REMAPPING], n=1, cutoff=0.5)
            nearest = f"; the nearest that it knows is {close[0]!r}" if close else ""
            message = f"is of a kind that mlx-lm {mlx_lm.__version__} does not know{nearest}."
        raise UserError(f"config.json: model_type {model_type!r} {message}") from error


def refuse_unserved(
    path: Path, uses: Collection[str], *, image: str | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse a checkpoint before its weights are read, as patched(model, uses=uses) would refuse the loaded model.

    The uses are of TRAINING, PACKING and INFERENCE; `image` is that of load(), and None for text. A config from which
    no model can be built is left to the loader, which says why.
    """
    config = plain_config(path, trust_remote_code)
    if config.get("model_file"):
        return
    try:
        (_classes if image is None else architecture)(config)
    except UserError:
        return
    report = left_alone_for(uses)
    if not report.left_alone:
        return
    try:
        with drawing_from(mx.random.key(0)):
            model = (_built if image is None else build_vision)(completed(config))
    except BUILD_ERRORS:
        return
    refuse(report, model, uses)


def checked(model_class: type, path: Path) -> type:
    """A subclass of `model_class` that compares every tensor before loading, and names those missed by `sanitize`."""

    def load_weights(self: nn.Module, weights: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
        _compare(path, dict(weights), arrays_of(self.parameters()))
        if needs_whole_matrices():
            weights = without_gaps(weights)
        return model_class.load_weights(self, weights, strict=strict)  # type: ignore[attr-defined]

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        try:
            return with_joined_experts(model_class.sanitize(self, with_released_names(weights)))  # type: ignore[attr-defined]
        except KeyError as error:
            raise UserError(f"model {path}: tensor {error} is missing.") from error
        except (ValueError, IndexError) as error:
            raise UserError(f"model {path}: its tensors do not fit its config.json: {reason(error)}") from error

    body: dict[str, Any] = {"load_weights": load_weights}
    if hasattr(model_class, "sanitize"):
        body["sanitize"] = sanitize
    return type(model_class.__name__, (model_class,), body)


def _compare(path: Path, stored: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """UserError that names every tensor which is missing, not expected, of another shape, or of integers."""
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected]
    pairs = [(name, stored[name], expected[name]) for name in expected if name in stored]
    shapes = [
        f"{name} has shape {new.shape}, {old.shape} expected" for name, new, old in pairs if new.shape != old.shape
    ]
    integers = [
        f"{name} has type {str(new.dtype).removeprefix('mlx.core.')}"
        for name, new, old in pairs
        if is_floating(old) and not is_floating(new)
    ]
    kinds = {
        "missing": missing,
        "unknown to the model": extra,
        "misshapen": shapes,
        "not of a floating-point type": integers,
    }
    problems = [f"{len(names)} {problem} ({first_few(names, 4, ', ')})" for problem, names in kinds.items() if names]
    if not problems:
        return
    hint = ""
    if any(name.endswith(".scales") for name in extra):
        hint = " The weights are quantised, but config.json has no `quantization` for them."
    elif any(name.endswith(".scales") for name in missing):
        hint = " config.json says that the weights are quantised, but they are not."
    elif integers:
        hint = " Another tool quantised the weights, or they are damaged: take the original checkpoint."
    raise UserError(f"model {path}: the tensors do not fit config.json: {'; '.join(problems)}.{hint}")
