"""Merges an adapter into a full checkpoint: the base's own files, with the adapted tensors replaced and nothing else.

Tensors keep the names and the layout that they have in the base's files, whoever wrote them, so whatever reads the
base reads the merge: what mlx-lm's text models drop (vision towers, multi-token prediction) is carried through, and
every tensor that training did not touch is carried bit for bit.
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
from ..lora import adapters, load_adapters
from ..lora.adapter_files import WEIGHTS as WEIGHTS_FILE
from ..lora.adapter_files import read_config, read_weights
from ..lora.parts import part_of
from ..lora.tensor_files import Header, write_tensors
from ..lora.weights import OUTPUT_SCALES, dense_weight, is_quantized
from .checkpoint_files import INDEX, WEIGHTS, read_json, weight_headers
from .load import load_model, load_vision_tower, locate
from .stored_names import StoredNames
from .vision.load import sanitizer

_QUANTISATION_KEYS = ("quantization", "quantization_config")
_NOT_COPIED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5", ".msgpack", ".gguf")


@dataclass
class Merge:
    """What a merge wrote: `changed` tensors of the base's files, `removed` ones (scales of what is plain now)."""

    path: Path
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def merge_checkpoint(
    model_path: str | Path, adapter_path: str | Path, save_path: str | Path, dequantize: bool = False
) -> Merge:
    """Write the checkpoint `model_path` with the adapter in `adapter_path` folded in to the new folder `save_path`.

    A quantised base is quantised again at its own width, or written plain throughout with `dequantize`. The folder
    appears complete, in one move, or not at all. UserError for an adapter of another model, a base whose tensors
    cannot be written back, a folder that exists already, a disk that refuses.
    """
    path, save_path = locate(model_path), Path(save_path)
    if save_path.exists() and (not save_path.is_dir() or any(save_path.iterdir())):
        raise UserError(f"{save_path}: exists already; give the path of a new folder for the merged model.")
    headers = weight_headers(path)
    changes = _changes(path, Path(adapter_path), dequantize)
    done = Merge(
        save_path,
        [name for name, value in changes.items() if value is not None],
        [name for name, value in changes.items() if value is None],
    )
    temporary = save_path.parent / f".{save_path.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write_weights(path, temporary, headers, changes)
        _write_rest(path, temporary, dequantize)
        if save_path.exists():
            save_path.rmdir()
        os.rename(temporary, save_path)
    except OSError as error:
        raise UserError(f"{save_path}: the merged model cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def _changes(path: Path, adapter_path: Path, dequantize: bool) -> dict[str, mx.array | None]:
    """{name in the base's files: new value, or None where it goes}. Values are lazy: nothing is in memory yet."""
    if _adapts_vision(adapter_path):
        model = load_vision_tower(path)
        names = StoredNames(model, path, sanitizer(model))
    else:
        model, _ = load_model(path, lazy=True)
        names = StoredNames(model, path)
    before = _flat(model)
    load_adapters(model, adapter_path)
    new: dict[str, mx.array] = {}
    gone: list[str] = []
    found = adapters(model)
    for name, adapter in found.items():
        base = adapter.linear if "linear" in adapter else adapter.embedding
        _collect(name, base, adapter.fuse(dequantize=dequantize), new, gone)
    if not found:
        after = _flat(model)
        new = {name: after[name] for name in after if after[name] is not before[name]}
    if dequantize:
        for name, module in model.named_modules():
            if is_quantized(module) and not name.startswith(tuple(f"{path}." for path in found)):
                new[f"{name}.weight"] = dense_weight(module)
                packing = ("scales", "biases", "global_scale", *OUTPUT_SCALES)
                gone += [f"{name}.{key}" for key in packing if module.get(key) is not None]
    return names.write_back(new, gone)


def _adapts_vision(adapter_path: Path) -> bool:
    """Whether the adapter reaches beyond the language model, whose tensors mlx-lm names as mlx-vlm does."""
    read_config(adapter_path)
    return any(part_of(name) is not None for name in read_weights(adapter_path / WEIGHTS_FILE))


def _flat(module: nn.Module) -> dict[str, mx.array]:
    return tree_flatten(module.parameters(), destination={})  # type: ignore[return-value]


def _collect(name: str, base: nn.Module, fused: nn.Module, new: dict[str, mx.array], gone: list[str]) -> None:
    old, now = _flat(base), _flat(fused)
    new.update({f"{name}.{key}": value for key, value in now.items() if value is not old.get(key)})
    gone += [f"{name}.{key}" for key in old if key not in now]


def _write_weights(
    source: Path, target: Path, headers: Mapping[str, Header], changes: dict[str, mx.array | None]
) -> None:
    weight_map, total = {}, 0
    for file, header in headers.items():
        touched = [name for name in header.tensors if name in changes]
        if touched:
            tensors = {**header.tensors, **{name: changes.pop(name) for name in touched}}
            tensors_left = {name: value for name, value in tensors.items() if value is not None}
            total += sum(value.nbytes if isinstance(value, mx.array) else value.size for value in tensors_left.values())
            write_tensors(target / file, tensors_left, header.metadata)
        else:
            tensors_left = dict(header.tensors)
            total += sum(stored.size for stored in tensors_left.values())
            shutil.copyfile(source / file, target / file)
        weight_map.update(dict.fromkeys(tensors_left, file))
    if (source / INDEX).is_file():
        index = read_json(source / INDEX)
        index["weight_map"] = {name: weight_map[name] for name in index["weight_map"] if name in weight_map}
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] = total
        (target / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")


def _write_rest(source: Path, target: Path, dequantize: bool) -> None:
    """Tokenizer, templates, config, licence: files of the folder itself. Formats that can carry code stay behind."""
    replaced = {file.name for file in source.glob(WEIGHTS)} | {INDEX}
    for file in sorted(source.iterdir()):
        left = file.name in replaced or file.name.startswith(".") or file.suffix in _NOT_COPIED
        if file.is_file() and not left:
            shutil.copyfile(file, target / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)
    if dequantize:
        config: dict[str, Any] = read_json(source / "config.json")
        for part in (config, config.get("text_config") or {}):
            for key in _QUANTISATION_KEYS:
                part.pop(key, None)
        (target / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
