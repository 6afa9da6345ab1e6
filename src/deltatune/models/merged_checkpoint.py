"""Merges an adapter into its base checkpoint and writes the result as a new checkpoint (`deltatune merge`).

The new checkpoint has the files of the base, with the adapted tensors replaced. A model that was trained as a whole is
written alike. Tensors keep their names and layout, so that every reader of the base reads the merge. All other tensors
are copied bit for bit, including those that mlx-lm's text models ignore (vision towers, multi-token prediction).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..lora import adapters, load_adapters
from ..lora.adapter import Adapter
from ..lora.adapter_files import options_of
from ..lora.new_rows import grown_tables
from ..lora.rounding import Rounding
from ..lora.weights import OUTPUT_SCALES, dense_weight, is_quantized
from ..ops.functional import arrays_of, is_finite
from .adapted_base import load_base
from .checkpoint_files import QUANTISATION_KEYS, weight_headers
from .checkpoint_writer import Changes, unwritten_ends, write_picture_options, write_rest, write_weights
from .load import locate
from .stored_names import StoredNames
from .trained_checkpoint import changes_from, grown_config, is_trained_checkpoint


@dataclass
class Merge:
    """The result of a merge: its folder, the names of tensors with new values, and of those left out (scales and biases
    of weights that are no longer quantised); the error of quantising merged matrices again, None where none was; and a
    sentence on how pictures were prepared in training, where the checkpoint's files now say it.
    """

    path: Path
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    rounding: Rounding | None = None
    pictures: str | None = None


def merge_checkpoint(
    model_path: str | Path, adapter_path: str | Path, save_path: str | Path, dequantize: bool = False
) -> Merge:
    """Merge an adapter into its base checkpoint and write the result to a new folder.

    The folder is written under another name and renamed when it is complete, so an error leaves no part of it.

    Args:
        model_path: The base checkpoint: a folder, or a name on the Hugging Face hub.
        adapter_path: The folder of the adapter, or of a run that trained the whole model.
        save_path: The folder to write. It must not exist or must be empty.
        dequantize: Write all weights of a quantised base without quantisation. Otherwise merged weights are quantised
            again as they were.

    Returns:
        The names of the tensors that changed, and the error of quantising them again.

    Raises:
        UserError: The adapter belongs to another model, the base's tensors cannot be written back, a merged weight is
            not finite, the folder exists, or it cannot be written.

    Example:
        >>> merge_checkpoint("path/to/model", "adapters", "merged").changed
    """
    path, save_path = locate(model_path), Path(save_path)
    if save_path.exists() and (not save_path.is_dir() or any(save_path.iterdir())):
        raise UserError(f"{save_path}: this folder exists already; give the path of a new one for the merged model.")
    headers = weight_headers(path)
    changes, config, rounding = _changes(path, Path(adapter_path), dequantize)
    merge = Merge(
        save_path,
        [name for name, value in changes.items() if value is not None],
        [name for name, value in changes.items() if value is None],
        rounding,
    )
    temporary = save_path.parent / f".{save_path.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        write_weights(path, temporary, headers, changes)
        write_rest(path, temporary, config, unwritten_ends(path))
        merge.pictures = write_picture_options(temporary, options_of(Path(adapter_path)))
        if save_path.exists():
            save_path.rmdir()
        os.rename(temporary, save_path)
    except OSError as error:
        raise UserError(f"{save_path}: the merged model cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return merge


def _changes(path: Path, adapter_path: Path, dequantize: bool) -> tuple[Changes, dict[str, Any], Rounding | None]:
    """({name in the base's files: its new value, or None to remove it}, the new config.json, the rounding).

    Values are lazy and take no memory yet.
    """
    if is_trained_checkpoint(adapter_path):
        if dequantize:
            raise UserError(
                f"--dequantize writes merged weights without quantisation, and {adapter_path} holds a whole model: "
                f"mlx_lm.convert --hf-path {adapter_path} --dequantize does that."
            )
        return *changes_from(path, adapter_path), None
    rounding = _measure_rounding(path, adapter_path, dequantize)
    return *_merged_changes(path, adapter_path, dequantize), rounding


def _merged_changes(path: Path, adapter_path: Path, dequantize: bool) -> tuple[Changes, dict[str, Any]]:
    model = load_base(path, adapter_path)
    names = StoredNames(model, path)
    before = arrays_of(model.parameters())
    load_adapters(model, adapter_path)
    new: dict[str, mx.array] = {}
    removed: list[str] = []
    adapted, grown = adapters(model), grown_tables(model)
    for name, adapter in adapted.items():
        _collect(name, _base(adapter), adapter.fuse(dequantize=dequantize), new, removed)
    for name, table in grown.items():
        _collect(name, table.base, table.plain(dequantize=dequantize), new, removed)
    replaced = tuple(f"{name}." for name in (*adapted, *grown))
    if not adapted:
        # The adapter folder holds whole weights, of a model that was trained without adapters.
        after = {name: array for name, array in arrays_of(model.parameters()).items() if not name.startswith(replaced)}
        new |= {name: after[name] for name in after if after[name] is not before[name]}
    if dequantize:
        for name, module in model.named_modules():
            if is_quantized(module) and not name.startswith(replaced):
                new[f"{name}.weight"] = dense_weight(module)
                packing = ("scales", "biases", "global_scale", *OUTPUT_SCALES)
                removed += [f"{name}.{key}" for key in packing if module.get(key) is not None]
    config = grown_config(model, path)
    for part in (config, config.get("text_config") or {}) if dequantize else ():
        for key in QUANTISATION_KEYS:
            part.pop(key, None)
    return {**names.write_back(new, removed)}, config


def _measure_rounding(path: Path, adapter_path: Path, dequantize: bool) -> Rounding | None:
    """Compute every merged matrix once, and return the error of quantising them again; None where none is quantised.
    UserError for a matrix that is not finite.
    """
    # A computed array stays in memory as long as its module, so each module is emptied here, in a model of its own.
    model = load_base(path, adapter_path)
    load_adapters(model, adapter_path)
    rounding = Rounding()
    for name, adapter in adapters(model).items():
        base = _base(adapter)
        fused = adapter.fuse(dequantize=dequantize)
        if not is_finite(dense_weight(fused)):
            raise UserError(
                f"{name}: its weight would hold NaN or infinity after the merge. Where the model alone gives a finite "
                "loss (deltatune eval), the sum is too large for its type: train again with a smaller scale."
            )
        if isinstance(adapter, Adapter) and is_quantized(base) and not dequantize:
            rounding.add(name, adapter, fused)
        base.clear()
    return rounding if rounding.errors else None


def _base(adapter: nn.Module) -> nn.Module:
    return adapter["linear"] if "linear" in adapter else adapter["embedding"]


def _collect(name: str, base: nn.Module, fused: nn.Module, new: dict[str, mx.array], removed: list[str]) -> None:
    """Add the tensors in which `fused` differs from `base` to `new`, and the names of those it lacks to `removed`."""
    before, after = arrays_of(base.parameters()), arrays_of(fused.parameters())
    new.update({f"{name}.{key}": value for key, value in after.items() if value is not before.get(key)})
    removed += [f"{name}.{key}" for key in before if key not in after]
