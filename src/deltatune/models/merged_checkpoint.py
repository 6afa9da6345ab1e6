"""Merges an adapter into its base checkpoint and writes the result as a new checkpoint (`deltatune merge`).

The new checkpoint has the files of the base, with the adapted tensors replaced. Tensors keep their names and layout, so
every program that reads the base reads the merge. All other tensors are copied bit for bit, including those that
mlx-lm's text models ignore (vision towers, multi-token prediction).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import UserError
from ..json_files import read_json
from ..lora import adapters, load_adapters
from ..lora.adapter import Adapter
from ..lora.adapter_files import WEIGHTS as WEIGHTS_FILE
from ..lora.adapter_files import read_config, read_weights
from ..lora.new_rows import GrownTable, grown_tables
from ..lora.parts import part_of
from ..lora.rounding import Rounding
from ..lora.tensor_files import Header, write_tensors
from ..lora.weights import OUTPUT_SCALES, dense_weight, is_quantized
from ..ops.functional import is_finite
from .checkpoint_files import INDEX, QUANTISATION_KEYS, UNCHECKED_FORMATS, WEIGHTS, weight_headers
from .load import load_model, load_vision_tower, locate
from .stored_names import Sanitize, StoredNames
from .vision.load import sanitizer
from .vocabulary import with_vocab_size


@dataclass
class Merge:
    """What a merge wrote.

    Attributes:
        path: The folder of the merged checkpoint.
        changed: The names of tensors with new values.
        removed: The names of tensors that are left out: scales and biases of weights that are no longer quantised.
        rounding: What quantising merged matrices again cost. None where none was quantised again.
    """

    path: Path
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    rounding: Rounding | None = None


def merge_checkpoint(
    model_path: str | Path, adapter_path: str | Path, save_path: str | Path, dequantize: bool = False
) -> Merge:
    """Merge an adapter into its base checkpoint and write the result to a new folder.

    The folder is written under another name and renamed when it is complete, so an error leaves no part of it.

    Args:
        model_path: The base checkpoint: a folder, or a name on the Hugging Face hub.
        adapter_path: The folder of the adapter.
        save_path: The folder to write. It must not exist or must be empty.
        dequantize: Write all weights of a quantised base without quantisation. Otherwise merged weights are quantised
            again as they were.

    Returns:
        The names of the tensors that changed.

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
    rounding = _measure_rounding(path, Path(adapter_path), dequantize)
    changes, config = _changes(path, Path(adapter_path), dequantize)
    merge = Merge(
        save_path,
        [name for name, value in changes.items() if value is not None],
        [name for name, value in changes.items() if value is None],
        rounding,
    )
    temporary = save_path.parent / f".{save_path.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write_weights(path, temporary, headers, changes)
        _write_rest(path, temporary, config)
        if save_path.exists():
            save_path.rmdir()
        os.rename(temporary, save_path)
    except OSError as error:
        raise UserError(f"{save_path}: the merged model cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return merge


def _changes(path: Path, adapter_path: Path, dequantize: bool) -> tuple[dict[str, mx.array | None], dict[str, Any]]:
    """({name in the base's files: its new value, or None to remove it}, the content of the new config.json).

    Values are lazy and take no memory yet.
    """
    model, sanitize = _load(path, adapter_path)
    names = StoredNames(model, path, sanitize)
    before = _flat(model)
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
        after = {name: array for name, array in _flat(model).items() if not name.startswith(replaced)}
        new |= {name: after[name] for name in after if after[name] is not before[name]}
    if dequantize:
        for name, module in model.named_modules():
            if is_quantized(module) and not name.startswith(replaced):
                new[f"{name}.weight"] = dense_weight(module)
                packing = ("scales", "biases", "global_scale", *OUTPUT_SCALES)
                removed += [f"{name}.{key}" for key in packing if module.get(key) is not None]
    return names.write_back(new, removed), _merged_config(path, grown, dequantize)


def _load(path: Path, adapter_path: Path) -> tuple[nn.Module, Sanitize | None]:
    """Load the base lazily, through the library that knows what the adapter changes; None stands for its sanitize."""
    if _adapts_vision(adapter_path):
        model = load_vision_tower(path)
        return model, sanitizer(model)
    return load_model(path, lazy=True)[0], None


def _measure_rounding(path: Path, adapter_path: Path, dequantize: bool) -> Rounding | None:
    """Compute every merged matrix once, and return what quantising them again costs; None where none is quantised.

    Raises:
        UserError: A merged matrix is not finite.
    """
    # A computed array stays in memory as long as its module, so each module is emptied here, in a model of its own.
    model, _ = _load(path, adapter_path)
    load_adapters(model, adapter_path)
    rounding = Rounding()
    for name, adapter in adapters(model).items():
        base, fused = _base(adapter), adapter.fuse(dequantize=dequantize)
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


def _adapts_vision(adapter_path: Path) -> bool:
    """Whether the adapter changes modules outside the language model. mlx-lm and mlx-vlm name those inside alike."""
    read_config(adapter_path)
    return any(part_of(name) is not None for name in read_weights(adapter_path / WEIGHTS_FILE))


def _flat(module: nn.Module) -> dict[str, mx.array]:
    return tree_flatten(module.parameters(), destination={})  # type: ignore[return-value]


def _collect(name: str, base: nn.Module, fused: nn.Module, new: dict[str, mx.array], removed: list[str]) -> None:
    """Add the tensors in which `fused` differs from `base` to `new`, and the names of those it lacks to `removed`."""
    before, after = _flat(base), _flat(fused)
    new.update({f"{name}.{key}": value for key, value in after.items() if value is not before.get(key)})
    removed += [f"{name}.{key}" for key in before if key not in after]


def _write_weights(
    source: Path, target: Path, headers: Mapping[str, Header], changes: dict[str, mx.array | None]
) -> None:
    """Write the weight files, and an index if the base has one. Files without a change are copied as they are."""
    weight_map, total = {}, 0
    for file, header in headers.items():
        changed = [name for name in header.tensors if name in changes]
        if changed:
            tensors = {**header.tensors, **{name: changes.pop(name) for name in changed}}
            written = {name: value for name, value in tensors.items() if value is not None}
            total += sum(value.nbytes if isinstance(value, mx.array) else value.size for value in written.values())
            write_tensors(target / file, written, header.metadata)
        else:
            written = dict(header.tensors)
            total += sum(stored.size for stored in written.values())
            shutil.copyfile(source / file, target / file)
        weight_map.update(dict.fromkeys(written, file))
    if (source / INDEX).is_file():
        index = read_json(source / INDEX)
        index["weight_map"] = {name: weight_map[name] for name in index["weight_map"] if name in weight_map}
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] = total
        (target / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")


def _merged_config(path: Path, grown: Mapping[str, GrownTable], dequantize: bool) -> dict[str, Any]:
    """Return the content of the base's config.json as it is for the merged model."""
    config = read_json(path / "config.json")
    for table in grown.values():
        before = table.base["weight"].shape[0]
        config = with_vocab_size(config, before, table.rows) if table.rows > before else config
    for part in (config, config.get("text_config") or {}) if dequantize else ():
        for key in QUANTISATION_KEYS:
            part.pop(key, None)
    return config


def _write_rest(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Copy all other files (tokenizer, chat templates, licence), except formats that can run code, and `config`."""
    replaced = {file.name for file in source.glob(WEIGHTS)} | {INDEX}
    for file in sorted(source.iterdir()):
        skipped = file.name in replaced or file.name.startswith(".") or file.suffix in UNCHECKED_FORMATS
        if file.is_file() and not skipped:
            shutil.copyfile(file, target / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)
    # Where nothing changed, the copy keeps the bytes of the original.
    if config != read_json(source / "config.json"):
        (target / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
