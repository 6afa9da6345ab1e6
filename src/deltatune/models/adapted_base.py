"""Loads the base of an adapter, with the adapter or through the library through which the adapter was trained.

mlx-vlm loads adapters on layers of experts only by a number of layers at the end of the model, never by names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..layers import layer_paths
from ..lora import adapters, load_adapters
from ..lora.adapter import Adapter
from ..lora.adapter_files import WEIGHTS, read_config
from ..lora.select import MTP, adapter_class, part_of
from ..lora.tensor_files import read_header
from ..lora.weights import is_switch
from .checkpoint_files import is_trained_checkpoint
from .load import Loaded, load_model, load_vision_tower, locate
from .load import load as load_checkpoint
from .mtp import add_head
from .vision.split import has_vision

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
