"""Writes a checkpoint that is its base but for some tensors: weights, all other files, and settings in these.

The settings are the tokens at which generation stops, and how a run prepared its pictures.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import shutil
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..lora.adapter_files import CONFIG, RUN_OPTIONS
from ..lora.tensor_files import Header, StoredTensor, write_tensors
from ..machine import atomic_files
from ..machine.atomic_files import replace_file
from ..machine.json_files import read_json
from .checkpoint_files import INDEX, UNCHECKED_FORMATS, WEIGHTS, index_counts
from .load import load_tokenizer, locate, plain_config

#: The files with the settings of images, of videos, and of both.
IMAGES = "preprocessor_config.json"
VIDEOS = "video_preprocessor_config.json"
BOTH = "processor_config.json"
# The options of a run, and their names in the files. A limit has an older name beside its place under "size".
_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_SAMPLING = {"fps": "fps", "video_max_frames": "max_frames"}


def write_picture_options(folder: Path, options: Mapping[str, Any]) -> str | None:
    """Write the limits of images and the sampling of videos from a run's options into its folder; return a sentence or
    None.

    An option of None stands for the base's own value. The limits of a video stay the base's: they hold for all of its
    frames together in these files, and for each frame in a run.
    """
    trained_with = {name: options[name] for name in (*_SIZES, *_SAMPLING) if options.get(name) is not None}
    files = {name: read_json(folder / name) for name in (IMAGES, VIDEOS, BOTH) if (folder / name).is_file()}
    if not trained_with or not files.keys() & {IMAGES, BOTH}:
        return None
    both = files.get(BOTH, {})
    # Without settings of their own, videos are read by those of images.
    if VIDEOS not in files and "video_processor" not in both and "temporal_patch_size" in files.get(IMAGES, {}):
        files[VIDEOS] = copy.deepcopy(files[IMAGES])
    for content in (files.get(IMAGES), both.get("image_processor")):
        _set_limits(content, trained_with)
    for content in (files.get(VIDEOS), both.get("video_processor")):
        if content is not None:
            content.update({key: trained_with[name] for name, key in _SAMPLING.items() if name in trained_with})
    for name, content in files.items():
        atomic_files.write(folder / name, json.dumps(content, indent=2, ensure_ascii=False).encode())
    written = ", ".join(f"{name} {value}" for name, value in trained_with.items())
    return f"The processor's files say how pictures were prepared in training: {written}."


def _set_limits(content: dict[str, Any] | None, trained_with: Mapping[str, Any]) -> None:
    """Set the smallest and the largest area of an image in a processor's settings."""
    if content is None:
        return
    for name in _SIZES.keys() & trained_with.keys():
        if isinstance(content.get("size"), dict):
            content["size"][_SIZES[name]] = trained_with[name]
        if name in content or not isinstance(content.get("size"), dict):
            content[name] = trained_with[name]


NAME = "generation_config.json"


def end_tokens(model_path: str | Path, texts: Sequence[str]) -> list[int]:
    """Return the tokens that end an answer: those of a checkpoint, then `texts`, tokens as they are written or their
    numbers.
    """
    path = locate(model_path)
    tokenizer = tokenizer_of(path)
    known = tokenizer.get_vocab()
    ends = sorted(tokenizer.eos_token_ids)
    for text in texts:
        number = known.get(text, int(text) if text.isdecimal() else None)
        if number not in known.values():
            raise UserError(f"--extra-eos-token: {text!r} is no token of this model, and no token's number.")
        ends = [*(end for end in ends if end != number), number]
    return ends


def unwritten_ends(folder: Path) -> list[int]:
    """Return the tokens at which generation stops in mlx-lm and here, if transformers overlooks one of them; else none.

    mlx-lm stops at the tokenizer's end token and at those of generation_config.json; transformers at the latter alone.
    A checkpoint without a tokenizer that loads here, without code of its own, is left as it is.
    """
    written = read_json(folder / NAME) if (folder / NAME).is_file() else read_json(folder / "config.json")
    stated = written.get("eos_token_id", (written.get("text_config") or {}).get("eos_token_id"))
    try:
        ends = tokenizer_of(folder).eos_token_ids
    except UserError:
        return []
    return sorted(ends) if ends - set(stated if isinstance(stated, list) else [stated]) else []


def write_ends(folder: Path, ends: Sequence[int]) -> None:
    """Write the tokens at which generation stops into the generation_config.json of a checkpoint's folder."""
    _change(folder / NAME, eos_token_id=list(ends))


def write_tokenizer_end(folder: Path, end: int) -> None:
    """Make a token the end token of the tokenizer in a checkpoint's folder, where llama.cpp's converter reads it."""
    token = tokenizer_of(folder).convert_ids_to_tokens(end)
    _change(folder / "tokenizer_config.json", eos_token=token)


def tokenizer_of(folder: Path) -> Any:
    """Return mlx-lm's wrapper of the tokenizer, also that of a model which mlx-vlm alone knows."""
    return load_tokenizer(folder, plain_config(folder, trust_remote_code=True))


def _change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, which need not exist."""
    content = {**(read_json(path) if path.is_file() else {}), **fields}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}).") from error


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

    Files without a change are copied. The changes, which may be lazy, are taken out of their dictionary as they are
    written.
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
