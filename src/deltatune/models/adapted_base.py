"""Loads the base of an adapter, with the adapter or through the library through which the adapter was trained.

mlx-lm drops the tensors of a multi-token-prediction head, which predicts the token after the next one, and mlx-vlm has
its modules. The head becomes a child of the model, so that adapters, saves and plans treat it as any other module.

mlx-vlm loads adapters on layers of experts only by a number of layers at the end of the model, never by names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError, reason
from ..layers import layer_paths
from ..lora import adapters, load_adapters
from ..lora.adapter import Adapter
from ..lora.adapter_files import WEIGHTS, read_config
from ..lora.select import MTP, adapter_class, part_of
from ..lora.tensor_files import read_header
from ..lora.weights import is_switch
from ..machine import packages
from ..upstream import draft_forward
from .checkpoint_files import is_trained_checkpoint, only_chosen, weight_headers
from .load import Loaded, load_model, load_vision_tower, locate, plain_config
from .load import load as load_checkpoint
from .transformers_configs import completed, text_part, with_known_type
from .vision.split import has_vision
from .vocabulary import token_tables

#: The key of adapter_config.json that names the library: "mlx-lm", or "mlx-vlm" for a run on images.
LOADER = "loader"
_MLX_VLM = "mlx-vlm"


def loader_of(model: nn.Module) -> str:
    """Return the name of the library that a model's class belongs to."""
    return _MLX_VLM if has_vision(model) else "mlx-lm"


def load_base(path: Path, adapter_path: Path) -> nn.Module:
    """Load a checkpoint, lazily, for the adapter in `adapter_path`, through the library that its config names.

    An adapter that another program wrote does not name the library. Then mlx-vlm loads the base if the adapter changes
    modules of a vision tower or projector; their names are the same in both libraries.
    """
    loader = read_config(adapter_path).get(LOADER)
    parts = {part_of(name) for name in read_header(adapter_path / WEIGHTS).tensors}
    adapts_vision = bool(parts - {None, MTP}) if loader is None else loader == _MLX_VLM
    model = load_vision_tower(path) if adapts_vision else load_model(path, lazy=True)[0]
    if MTP in parts:
        add_head(model, path)
    return model


def folder_of(model: str | Path | None, adapter_path: str | None) -> Path:
    """Return the folder that load() reads: the adapter's, where a run trained the whole model."""
    if adapter_path and is_trained_checkpoint(Path(adapter_path)):
        return Path(adapter_path)
    return locate(model)


def load(
    model: str | Path | None,
    adapter: str | Path | None = None,
    *,
    bare: bool = False,
    mtp: bool = False,
    **options: Any,
) -> Loaded:
    """Load a model with its tokenizer, and an adapter of it.

    Args:
        model: A checkpoint folder, or a name on the Hugging Face hub of the form owner/model.
        adapter: The folder of a run. Where that trained the whole model, it holds the model itself.
        bare: Whether an adapter is left out.
        mtp: Whether the model gets the multi-token-prediction head of its checkpoint.
        options: trust_remote_code, lazy, from_scratch, seed and image, as models.load.load() takes them.

    Returns:
        The model in inference mode, its tokenizer, its config and its folder.

    Raises:
        UserError: The checkpoint or the adapter is missing, damaged or of an unknown kind, they do not fit, or the
            checkpoint would run code.

    Example:
        >>> loaded = load("path/to/model", adapter="adapters")
        >>> loaded.model(mx.array([loaded.tokenizer.encode("Hello")])).shape
    """
    whole = bool(adapter) and is_trained_checkpoint(Path(str(adapter)))
    loaded = load_checkpoint(adapter if whole else model, **options)
    if mtp:
        add_head(loaded.model, loaded.path)
    if adapter and not whole and not bare:
        put_adapter(loaded, adapter)
        loaded.model.eval()
    return loaded


def put_adapter(loaded: Loaded, adapter_path: str | Path) -> None:
    """Add the adapter in a folder to a model that was loaded for images or for text.

    Without images a model has no vision tower, and without drafts no multi-token-prediction head. An adapter's updates
    of them have no effect then: they are left out.
    """
    left_out = set() if MTP in loaded.model else {MTP}
    if loaded.config.get("vision_config") and not has_vision(loaded.model):
        left_out |= {"vision", "projector"}
    load_adapters(loaded.model, adapter_path, left_out=left_out)


def layers_for_mlx_vlm(model: nn.Module) -> int | None:
    """The number of layers that mlx-vlm needs to load this model's adapters, or None where names are enough."""
    return _completely_adapted_layers(model) if _is_loaded_by_number(model) else None


def refused_by_mlx_vlm(model: nn.Module) -> list[str]:
    """A list with a message if mlx-vlm cannot load this model's adapter, else an empty list."""
    if not _is_loaded_by_number(model) or _completely_adapted_layers(model) is not None:
        return []
    return [
        "mlx-vlm 0.7.10 loads adapters on experts only if every module of the last layers has one and no other module "
        "does, so it cannot load this adapter. deltatune can; to use the model with mlx-vlm, merge the adapter."
    ]


def _is_loaded_by_number(model: nn.Module) -> bool:
    switches = [isinstance(adapter, Adapter) and is_switch(adapter.base) for adapter in adapters(model).values()]
    return has_vision(model) and any(switches)


def _completely_adapted_layers(model: nn.Module) -> int | None:
    """How many of the last layers are adapted completely: every module that can take an adapter has one.

    None if any other module has an adapter, or one of those modules has none.
    """
    adapted = adapters(model)
    layers = layer_paths(model)
    inside_adapters = tuple(f"{path}." for path in adapted)
    is_adapted = [any(path.startswith(f"{layer}.") for path in adapted) for layer in layers]
    count = sum(is_adapted)
    last = tuple(f"{layer}." for layer in layers[len(layers) - count :])
    if not count or not all(is_adapted[len(layers) - count :]) or not all(path.startswith(last) for path in adapted):
        return None
    for path, module in model.named_modules():
        unadapted = path not in adapted and not path.startswith(inside_adapters) and path.startswith(last)
        if unadapted and "weight" in module and not isinstance(adapter_class(module, False), str):
            return None
    return count


# The model types with heads that tests train.
_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "glm_moe_dsa")
# The first mlx-vlm that loads a head beside its model.
_SINCE = "0.7.10"


def add_head(model: nn.Module, path: Path) -> None:
    """Add the head of a checkpoint to its model in place, as the child `mtp`, in inference mode.

    UserError: the model was loaded for images, no head in it can be trained, its tensors do not fit, or mlx-vlm lacks
    it.
    """
    if has_vision(model):
        raise UserError("mtp: the head of a model trains on text, and the data have images; leave those rows out.")
    splitter, config, _ = _stored(path)
    try:
        with only_chosen(path) as folder:
            head = splitter.load(folder, source_config=config)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"mtp: the tensors of the multi-token-prediction head of {path} do not fit its config.json: "
            f"{reason(error)}. Take the files of the original model."
        ) from error
    model[MTP] = head.eval()


def head_sanitizer(path: Path) -> Callable[[Mapping[str, mx.array]], dict[str, mx.array]]:
    """Return the function from all tensors of a checkpoint's files to the parameters of a model that are its head's."""
    splitter, config, of_mlx = _stored(path)
    text = splitter.read_text_config(config)

    def sanitize(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        of_head = {name: tensor for name, tensor in tensors.items() if splitter.select_keys(name, text)}
        return {f"{MTP}.{name}": tensor for name, tensor in splitter.transform(of_head, text, of_mlx).items()}

    return sanitize


def two_ahead(model: nn.Module) -> Callable[[mx.array, mx.array], mx.array]:
    """Return the head as a function of a row's hidden states and of the tokens that follow.

    It takes the hidden states [B, T, D] of the model behind its last norm and the token behind each position [B, T],
    and returns [B, T, D], of which the model's own output head makes the logits of the tokens after those.

    Source: https://arxiv.org/abs/2412.19437, section 2.2; mlx_vlm.speculative.drafters.
    """
    head: Any = model[MTP]
    embedding = next(iter(token_tables(model).values()))
    forward = draft_forward(head)

    return lambda hidden, following: forward(embedding(following), hidden, following)


def _stored(path: Path) -> tuple[Any, dict[str, Any], bool]:
    """mlx-vlm's reader of a head's tensors, the config.json for it, and whether the tensors are in MLX's form."""
    splitter, config = reader_of(path)
    text = text_part(config)
    headers = () if splitter is None else weight_headers(path).values()
    holding = [header for header in headers if any(splitter.select_keys(name, text) for name in header.tensors)]
    if not holding:
        raise UserError(
            f"mtp: model {path} ({config['model_type']}) has no multi-token-prediction head that can be trained: "
            "the tensors of that of a Qwen3.5, Qwen3-Next, Nemotron-H or GLM-5 model were expected. Converted "
            "checkpoints often lack them: take the original model, or leave mtp out."
        )
    of_mlx = splitter.supports_mlx_source and any(header.metadata.get("format") == "mlx" for header in holding)
    return splitter, config, of_mlx


def reader_of(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's reader of heads of a checkpoint's family, None for one without, and the config.json for it."""
    try:
        from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter, get_mtp_splitter

        loads = hasattr(MTPSplitter, "load")
    except ImportError:
        loads = False
    if not loads:
        installed = packages.versions(["mlx-vlm"]).get("mlx-vlm", "none")
        raise UserError(
            f"mtp: the head's modules are those of mlx-vlm {_SINCE} or later, and {installed} is installed: "
            f"pip install 'mlx-vlm>={_SINCE}'."
        )
    config = with_known_type(completed(plain_config(path, trust_remote_code=False)))
    if config["model_type"] not in _FAMILIES:
        return None, config
    text = dict(text_part(config))
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" not in rope:
        # All three positions of a token of text are equal, so that any division of the frequencies serves.
        half = int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        text["rope_parameters"] = {"type": "default", **rope, "mrope_section": [half, 0, 0]}
    config = {**config, "text_config": text}
    return get_mtp_splitter(source_config=config), config
