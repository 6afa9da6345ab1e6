"""Writes a checkpoint that is its base but for some tensors: the weights, and all other files of the base's folder."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..json_files import read_json
from ..lora.adapter_files import CONFIG, RUN_OPTIONS
from ..lora.tensor_files import Header, StoredTensor, write_tensors
from ..machine import atomic_files
from .checkpoint_files import INDEX, UNCHECKED_FORMATS, WEIGHTS, index_counts
from .generation_config import write_ends

#: New values of stored tensors by name; None removes a tensor.
Changes = dict[str, mx.array | StoredTensor | None]

# Files of the base's weights; Mistral's own layout stands beside that of transformers.
_WEIGHTS = (WEIGHTS, INDEX, "consolidated*.safetensors", "consolidated.safetensors.index.json")
# Files that a run leaves beside its weights. They belong to that run, not to a model that is made of its result.
_OF_A_RUN = ("metrics.jsonl", "report.html", RUN_OPTIONS, CONFIG, "*adapters.safetensors")


def take_tensors(header: Header, changes: Changes, written: Container[str] = ()) -> dict[str, mx.array | StoredTensor]:
    """Return the tensors of one of the base's files with its changes, which are taken out of `changes`.

    Those that another file holds too are left out if they are `written` by then.

    A lazy array takes memory from when it is written until nothing refers to it, so no other reference should stay.
    """
    tensors = {name: changes.pop(name, stored) for name, stored in header.tensors.items() if name not in written}
    return {name: value for name, value in tensors.items() if value is not None}


def write_weights(source: Path, target: Path, headers: Mapping[str, Header], changes: Changes) -> None:
    """Write weights into the same files as the base's, with an index if the base has one.

    Args:
        source: The folder of the base. Files without a change are copied as they are.
        target: The folder to write to.
        headers: The headers of the base's files by file name.
        changes: The changes, which may be lazy. They are taken out of this dictionary as they are written.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for file, header in headers.items():
        written = set(weight_map)
        changed = any(name in changes or name in written for name in header.tensors)
        for name, stored in header.tensors.items():
            value = changes.get(name, stored)
            if value is not None and name not in written:
                weight_map[name] = file
                total += value.nbytes if isinstance(value, mx.array) else value.size
        if changed:
            write_tensors(target / file, take_tensors(header, changes, written), header.metadata)
        else:
            shutil.copyfile(source / file, target / file)
    if index_counts(source):
        index = read_json(source / INDEX)
        index["weight_map"] = {name: weight_map[name] for name in index["weight_map"] if name in weight_map}
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] = total
        (target / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")


def write_rest(source: Path, target: Path, config: Mapping[str, Any], ends: Sequence[int]) -> None:
    """Copy the base's other files (tokenizer, processor, chat templates, licence), and write `config` as config.json.

    Weights, also those of another build or in another layout, formats that can run code, and a run's own files beside
    them stay behind. The tokens at which generation stops go into generation_config.json, where any are given.
    """
    left = (*_WEIGHTS, *_OF_A_RUN, ".*")
    for file in sorted(source.iterdir()):
        skipped = file.suffix in UNCHECKED_FORMATS or any(fnmatch.fnmatch(file.name, pattern) for pattern in left)
        if file.is_file() and not skipped:
            atomic_files.replace_file(target / file.name, partial(shutil.copyfile, file))
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)
    # Where nothing changed, the copy keeps the bytes of the original.
    if config != read_json(source / "config.json"):
        atomic_files.write(target / "config.json", json.dumps(config, indent=4).encode())
    if ends:
        write_ends(target, ends)
