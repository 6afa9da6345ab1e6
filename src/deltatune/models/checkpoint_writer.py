"""Writes a checkpoint that is its base but for some tensors: an adapter merged into it, or a model trained as a whole.

Tensors keep the base's names and layout, so that every reader of the base reads the result. All others are copied bit
for bit, including those that mlx-lm's text models ignore (vision towers, multi-token prediction). The base's other
files are copied; they get the tokens at which generation stops, and how a run prepared its pictures.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..lora import adapters, load_adapters
from ..lora.adapter import Adapter
from ..lora.adapter_files import CONFIG, RUN_OPTIONS, options_of
from ..lora.new_rows import grown_tables, plain_parameters
from ..lora.rounding import Rounding
from ..lora.tensor_files import Header, StoredTensor, write_tensors
from ..lora.weights import OUTPUT_SCALES, dense_weight, is_quantized
from ..machine import atomic_files
from ..machine.atomic_files import replace_file
from ..machine.json_files import read_json
from ..ops.functional import arrays_of, is_finite
from .adapted_base import load_base
from .checkpoint_files import (
    INDEX,
    QUANTISATION_KEYS,
    UNCHECKED_FORMATS,
    WEIGHTS,
    WHOLE,
    index_counts,
    is_trained_checkpoint,
    weight_headers,
)
from .load import load_tokenizer, locate, plain_config
from .stored_names import StoredNames
from .vision.split import has_vision
from .vocabulary import with_vocab_size

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


class TrainedCheckpoint:
    """The checkpoint of a model that trains as a whole, ready to train, by the folder from which it was loaded.

    One file has all weights: it is replaced in one move, so that no checkpoint mixes the weights of two saves.

    A model that began with random weights has no layout but MLX's own; `scratch_config` is its config.json, None for
    any other model. `note` is a sentence for the user where the weights cannot have the base's layout, else None.
    """

    def __init__(self, model: nn.Module, base: Path, scratch_config: Mapping[str, Any] | None = None):
        self._model = model
        self._base = base
        self._names: StoredNames | None = None
        self._ends = unwritten_ends(base)
        self.note: str | None = None
        if scratch_config is not None:
            # The weights of a vision tower will be missing where the model was made without one.
            left = () if has_vision(model) else ("vision_config",)
            self._config = {key: value for key, value in scratch_config.items() if key not in left}
            return
        self._config = grown_config(model, base)
        try:
            self._names = StoredNames(model, base)
            self._names.write_back(self._trained(), [])
        except UserError as error:
            self._names = None
            self.note = f"{WHOLE} will have MLX's names, and only the tensors that this run loads: {error}"

    def write(self, folder: Path, options: Mapping[str, Any]) -> None:
        """Write the present values into a folder, file by file, with the run's options for exports."""
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_file(folder / WHOLE, self._write_weights)
        write_rest(self._base, folder, self._config, self._ends)
        write_picture_options(folder, options)
        atomic_files.write(folder / RUN_OPTIONS, json.dumps(options, indent=4, sort_keys=True, default=str).encode())

    def _write_weights(self, path: Path) -> None:
        if self._names is None:
            write_tensors(path, dict(plain_parameters(self._model)), {"format": "mlx"})
        else:
            headers = weight_headers(self._base).values()
            write_tensors(path, self._stored_tensors(headers), next(iter(headers)).metadata)

    def _stored_tensors(self, headers: Iterable[Header]) -> dict[str, mx.array | StoredTensor]:
        """Return all tensors of the base with the trained values."""
        assert self._names is not None
        changes: Changes = {**self._names.write_back(self._trained(), [])}
        tensors: dict[str, mx.array | StoredTensor] = {}
        for header in headers:
            tensors |= take_tensors(header, changes, tensors)
        return tensors

    def _trained(self) -> dict[str, mx.array]:
        """The trained parameters, and the tables with new rows, by the names of the base's parameters."""
        trained = arrays_of(self._model.trainable_parameters())
        grown = tuple(f"{path}." for path in grown_tables(self._model))
        parameters = plain_parameters(self._model)
        return {name: array for name, array in parameters.items() if name in trained or name.startswith(grown)}


def grown_config(model: nn.Module, base: Path) -> dict[str, Any]:
    """Return the content of the base's config.json, with the rows that training added to the model."""
    config = read_json(base / "config.json")
    for table in grown_tables(model).values():
        before = table.base["weight"].shape[0]
        config = with_vocab_size(config, before, table.rows) if table.rows > before else config
    return config


def changes_from(base: Path, trained: Path) -> tuple[Changes, dict[str, Any]]:
    """Return the tensors in which a trained checkpoint differs from its base of the same tensors, and its config."""
    old, new = (
        {name: tensor for header in weight_headers(path).values() for name, tensor in header.tensors.items()}
        for path in (base, trained)
    )
    if old.keys() != new.keys():
        strange = min(old.keys() ^ new.keys())
        raise UserError(
            f"{trained}: this whole model has not the tensors of {base}, such as {strange}. Give the model that was "
            f"trained as --model; or use {trained} itself, as --model and without an adapter."
        )
    return {name: tensor for name, tensor in new.items() if not tensor.equals(old[name])}, read_json(
        trained / "config.json"
    )


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
