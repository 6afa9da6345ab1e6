"""Saves and loads adapters in mlx-lm's format: adapters.safetensors beside adapter_config.json.

mlx-lm rebuilds the adapters from `lora_parameters`: one rank, scale, dropout and kind for all, and `keys`, for which
deltatune writes the full path of every adapted module. When deltatune loads an adapter, the tensors themselves say
which modules carry one and of which rank, so mlx_lm.lora's defaults for missing options are not needed. Lower ranks are
padded with zeros when they are saved, and lose them again when deltatune loads them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError, first_few
from ..machine import checksum
from ..machine.atomic_files import replace_file
from ..machine.host_memory import as_numpy
from ..machine.json_files import read_json
from ..ops.functional import arrays_of, is_finite
from ..options.values import checked_options
from ..upstream import dropout_rate
from .adapter import ADAPTER_LEAVES, Adapter
from .convert import FINE_TUNE_TYPES, ConversionReport, adapters, install_adapters, make_adapters
from .new_rows import add_rows, grown_tables, parameter_name, row_count, stored_rows
from .select import MTP, part_of
from .tensor_files import read_header, write_tensors

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
# The id of the first row for new tokens. Adapters of earlier versions lack it, and have them behind the base's last.
_FIRST = "new_rows_from"
#: The options of a run that trained a whole model, beside the checkpoint that it wrote.
RUN_OPTIONS = "run_options.json"
_FACTORS = ("lora_a", "lora_b")

# An adapter of a fused linear (mlx_lm.models.afm7) holds a list of factors, so that a number may follow the name.
_LEAF = re.compile(rf"^(?P<path>.+)\.(?P<leaf>{'|'.join(ADAPTER_LEAVES)})(\.\d+)?$")


def save_adapters(
    model: nn.Module, directory: str | Path, config: Mapping[str, Any], *, weights: str = WEIGHTS, named: bool = True
) -> Path:
    """Write the trainable parameters of `model` into a folder, in mlx-lm's format; return the path of the tensors'
    file.

    Unequal ranks are padded with zeros, and unequal scales are multiplied into lora_b. Each file is replaced in one
    move, so that an interrupted save leaves the previous adapter readable. `config` holds the run's options, which are
    stored too. With `named`, adapted modules are listed as `keys`; without, `num_layers` says where the adapters are.
    UserError where the format cannot express the adapter (adapter_state), or the disk refuses.
    """
    directory = Path(directory)
    tensors, described = adapter_state(model)
    if not named:
        del described["lora_parameters"]["keys"]
    content = {**config, **described}
    content.setdefault("num_layers", -1)
    metadata = {checksum.KEY: checksum.BLANK, "format": "mlx"}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=4, sort_keys=True, default=str)
        replace_file(directory / weights, lambda path: write_tensors(path, tensors, metadata))
        replace_file(directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{directory}: the adapter cannot be written ({error.strerror}); free space, or choose another folder."
        ) from error
    return directory / weights


def adapter_state(model: nn.Module) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return the tensors to save by full path, and the part of adapter_config.json that says how to rebuild them.

    UserError for LoRA and DoRA together, unequal dropout, and tensors that train beside adapters: mlx-lm's format has
    no place for them.
    """
    new_rows = stored_rows(model)
    grown = tuple(f"{path}.new_" for path in grown_tables(model))
    flat = arrays_of(model.trainable_parameters())
    trained = {name: array for name, array in flat.items() if not name.startswith(grown)}
    by_path = adapters(model)
    firsts = [table.first for table in grown_tables(model).values()]
    where = {_FIRST: firsts[0]} if firsts else {}
    if not by_path:
        return trained | new_rows, {"fine_tune_type": "full", "lora_parameters": None, **where}
    outside = [name for name in trained if not name.startswith(tuple(f"{path}." for path in by_path))]
    if outside:
        raise UserError(
            f"{first_few(outside)} is trained beside adapters: mlx-lm's format has no place for it; freeze it."
        )
    kinds = {getattr(adapter, "kind", "lora"): path for path, adapter in by_path.items()}
    if len(kinds) > 1:
        raise UserError(
            f"LoRA ({kinds['lora']}) and DoRA ({kinds['dora']}) in one adapter: mlx-lm's format has one kind for all."
        )
    rates = {dropout_rate(adapter.dropout): path for path, adapter in by_path.items()}
    if len(rates) > 1:
        paths = first_few(list(rates.values()))
        raise UserError(f"{paths} differ in dropout: mlx-lm's format has one for all.")
    stored = {path: _stored(adapter) for path, adapter in by_path.items()}
    rank = max(_rank_of(leaves) for leaves in stored.values())
    scale = next(iter(by_path.values())).scale
    tensors = {}
    for path, adapter in by_path.items():
        unified = _with_rank_and_scale(path, adapter, stored[path], rank, scale)
        tensors.update({f"{path}.{leaf}": value for leaf, value in unified.items()})
    dropout = round(next(iter(rates)), 12)
    parameters = {"rank": rank, "scale": scale, "dropout": dropout, "keys": list(by_path)}
    return tensors | new_rows, {"fine_tune_type": next(iter(kinds)), "lora_parameters": parameters, **where}


def _stored(adapter: nn.Module) -> dict[str, Any]:
    return {key: adapter[key] for key in ADAPTER_LEAVES if key in adapter}


def load_adapters(model: nn.Module, directory: str | Path, *, left_out: Collection[str] = ()) -> ConversionReport:
    """Add the adapter in a folder, written by deltatune or mlx_lm.lora, to a model without adapters, in place.

    `left_out` are the parts, such as "vision", that the model has not; their tensors are left out. The report names the
    adapted modules, or the loaded tensors of a fully fine-tuned model. UserError for an adapter that is missing,
    damaged or made for another model.
    """
    directory = Path(directory)
    config = read_config(directory)
    kind = config.get("fine_tune_type", "lora")
    if kind not in FINE_TUNE_TYPES:
        raise UserError(
            f"{directory / CONFIG}: fine_tune_type {kind!r} is not known; expected {', '.join(FINE_TUNE_TYPES)}."
        )
    if adapters(model):
        raise ValueError("The model already carries adapters: load the base model again, or merge them first.")
    tensors = read_weights(directory / WEIGHTS)
    tensors = {name: tensor for name, tensor in tensors.items() if part_of(name) not in left_out}
    new_rows = _grow(model, directory, tensors, config.get(_FIRST))
    if kind == "full":
        _check_shapes(directory, tensors, arrays_of(model.parameters()))
        model.load_weights(list((tensors | new_rows).items()), strict=False)
        return ConversionReport(converted=sorted(tensors))
    tensors = _without_padding(tensors)
    made = _rebuild(model, directory, config, tensors, dora=kind == "dora")
    install_adapters(model, made)
    model.load_weights(list((tensors | new_rows).items()), strict=False)
    return ConversionReport(converted=list(made))


def load_adapter_weights(model: nn.Module, path: str | Path, *, compare: bool = True) -> None:
    """Load a file of adapter tensors into a model that already has adapters of the same rank on the same modules.

    With `compare`, a config beside the file with another rank, scale or kind than the model's adapters is refused.
    """
    tensors = read_weights(Path(path))
    if compare:
        _check_saved_settings(model, Path(path))
    tensors |= _pop_new_rows(tensors)
    expected = arrays_of(model.trainable_parameters())
    known = tensors.keys() & expected.keys()
    tensors |= {name: _fitted(name, tensors[name], expected[name].shape) for name in known}
    _check_shapes(Path(path), tensors, expected)
    model.load_weights(list(tensors.items()), strict=False)


def _check_saved_settings(model: nn.Module, path: Path) -> None:
    """Compare the kind, rank and scale in the config beside an adapter file with those of the model's adapters."""
    if not adapters(model) or not (path.parent / CONFIG).is_file():
        return
    config = read_config(path.parent)
    saved = {"fine_tune_type": config.get("fine_tune_type", "lora")}
    parameters = config.get("lora_parameters")
    if isinstance(parameters, dict):
        saved |= {name: parameters[name] for name in ("rank", "scale") if name in parameters}
    by_path = adapters(model).values()
    first = next(iter(by_path))
    current = {
        "fine_tune_type": getattr(first, "kind", "lora"),
        "rank": max(_rank_of(_stored(adapter)) for adapter in by_path),
        "scale": first.scale,
    }
    scale = saved.get("scale")
    if isinstance(scale, int | float) and math.isclose(scale, first.scale, rel_tol=1e-6):
        current["scale"] = scale
    differing = [name for name in saved if saved[name] != current[name]]
    if differing:
        there, here = (", ".join(f"{name} {settings[name]!r}" for name in differing) for settings in (saved, current))
        raise UserError(
            f"adapter {path}: {path.parent / CONFIG} says {there}, and the adapters of this run have {here}, with "
            "which the file would compute something else than it was trained for. Give this run the file's values."
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Read the adapter_config.json in `directory`; UserError for a missing one, another folder's mistake, or PEFT's."""
    path = directory / CONFIG
    if directory.is_file():
        raise UserError(f"adapter {directory}: this is a file; give its folder, {directory.parent}.")
    if not directory.is_dir():
        raise UserError(f"adapter {directory}: no such directory; expected one written by deltatune or mlx_lm.lora.")
    if not path.is_file() and (directory / "config.json").is_file():
        raise UserError(
            f"{directory}: it holds a whole model, not an adapter. Give it as --model, without an adapter; from a run "
            "that trained a whole model, export --to merged and --to gguf take it as --adapter-path too."
        )
    if not path.is_file():
        raise UserError(
            f"adapter {directory}: no {CONFIG} in it; expected a directory written by deltatune or mlx_lm.lora."
        )
    content = read_json(path)
    if "peft_type" in content:
        raise UserError(
            f"adapter {directory}: this is PEFT's; write it as MLX's first, and give that folder: deltatune import "
            f"--peft {directory} --model MODEL --save-path NEW."
        )
    return content


def write_mlx(adapter_path: str | Path, save_path: str | Path) -> Path:
    """Copy the two files that make an adapter into a new folder, for mlx_lm.generate, mlx_lm.server and LM Studio.

    Updates of a multi-token-prediction head are left out, since mlx-lm leaves out the head and refuses them.
    """
    adapter_path, save_path = Path(adapter_path), Path(save_path)
    config = read_config(adapter_path)
    tensors = read_weights(adapter_path / WEIGHTS)
    taken = {name: tensor for name, tensor in tensors.items() if part_of(name) != MTP}
    if not taken:
        raise UserError(
            f"adapter {adapter_path}: it updates the multi-token-prediction head alone, which mlx-lm leaves out; write "
            "a whole model with deltatune merge."
        )
    if (save_path / CONFIG).exists():
        raise UserError(f"{save_path}: it holds an adapter already; give a new folder as --save-path.")
    try:
        save_path.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(adapter_path / name, save_path / name)
        if len(taken) < len(tensors):
            write_tensors(save_path / WEIGHTS, taken, {"format": "mlx"})
            parameters = config["lora_parameters"]
            parameters["keys"] = [key for key in parameters["keys"] if part_of(key) != MTP]
            (save_path / CONFIG).write_text(json.dumps(config, indent=4, sort_keys=True), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{save_path}: the adapter cannot be written ({error.strerror}).") from error
    return save_path


def head_notes(adapter_path: str | Path, reader: str) -> list[str]:
    """Return a note where `reader` has no place for the updates of a head that an adapter holds; else an empty list."""
    if all(part_of(name) != MTP for name in read_header(Path(adapter_path) / WEIGHTS).tensors):
        return []
    return [
        f"The updates of the multi-token-prediction head are left out, since {reader} has no class for it; export --to "
        "merged carries them."
    ]


def options_of(directory: Path) -> dict[str, Any]:
    """Read the options of the run that wrote an adapter, or a whole model, into `directory`."""
    path = directory / RUN_OPTIONS
    return read_json(path) if path.is_file() else read_config(directory)


def template_options(directory: str | Path | None, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the chat template's variables in the training of a folder's adapter or model, overridden by those `asked`
    for.
    """
    options = {} if directory is None else options_of(Path(directory)).get("chat_template_config")
    trained = {} if options is None else checked_options(options, f"{directory}: chat_template_config")
    return {**trained, **(asked or {})}


def _pop_new_rows(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Take the rows for new tokens out of `tensors`; return them by the names of a grown model's parameters."""
    return {name: tensors.pop(stored) for stored in list(tensors) if (name := parameter_name(stored))}


def _grow(model: nn.Module, directory: Path, tensors: dict[str, mx.array], first: Any) -> dict[str, mx.array]:
    """Add to `model` the rows for new tokens that are in `tensors`, and return them; they are taken out of there."""
    rows = _pop_new_rows(tensors)
    counts = {name.rpartition(".")[0]: len(array) for name, array in rows.items() if array.ndim == 2}
    modules = dict(model.named_modules())
    _refuse(directory, [f"the model has no module {path}" for path in counts if path not in modules], len(rows))
    tables = [modules[path] for path in counts if "weight" in modules[path]]
    for most in map(row_count, tables) if first is not None else ():
        if not isinstance(first, int) or not 0 < first <= most:
            raise UserError(f"{directory / CONFIG}: {_FIRST}: expected a number from 1 to {most}, got {first!r}.")
    add_rows(model, counts, first)
    _check_shapes(directory, rows, arrays_of(model.parameters()))
    return rows


def check_file(path: Path) -> None:
    """Refuse, with a UserError, a path that is no file of MLX's adapters: a folder, nothing, or a file of PEFT's."""
    folder = path if path.is_dir() else path.parent
    if (folder / CONFIG).is_file():
        read_config(folder)
    _check_file(path)


def _check_file(path: Path) -> None:
    if not path.is_file():
        hint = f"it is a folder; give {path / WEIGHTS}" if path.is_dir() else "no such file"
        raise UserError(f"adapter {path}: {hint}.")


def read_weights(path: Path) -> dict[str, mx.array]:
    """Read the tensors of an adapter file, after its header and, if it holds one, its checksum were checked. UserError
    for a file that is damaged or empty, and for NaN or infinity.
    """
    _check_file(path)
    if not read_header(path).tensors:
        raise UserError(f"adapter {path}: holds no tensor.")
    try:
        checksum.check(path)
    except checksum.DamagedFileError as error:
        raise UserError(f"adapter {path}: is damaged ({error}); use another copy of it.") from error
    tensors: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    mx.eval(tensors)
    not_finite = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if not_finite:
        raise UserError(
            f"adapter {path}: {len(not_finite):,} of its {len(tensors):,} tensors hold NaN or infinity: "
            f"{first_few(not_finite)}. Take an earlier save of that run, or train again with a lower learning rate."
        )
    return tensors


def _rebuild(
    model: nn.Module, directory: Path, config: dict[str, Any], tensors: dict[str, mx.array], *, dora: bool
) -> dict[str, nn.Module]:
    """Make the adapters of `tensors`, by path, or refuse tensors that do not fit the model."""
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("scale"), int | float):
        raise UserError(f"{directory / CONFIG}: lora_parameters with a number `scale` expected, got {parameters!r}.")
    modules = dict(model.named_modules())
    ranks = {}
    misfits = []
    for name, tensor in tensors.items():
        match = _LEAF.match(name)
        if match is None:
            misfits.append(f"{name} is no adapter tensor")
        elif match["path"] not in modules:
            misfits.append(f"{name}: the model has no module {match['path']}")
        elif match["leaf"] == "lora_a" and tensor.ndim > 1:
            ranks[match["path"]] = tensor.shape[1]
    if not misfits:
        made = make_adapters(model, ranks, float(parameters["scale"]), parameters.get("dropout", 0.0), dora=dora)
        expected = {
            f"{path}.{name}": value
            for path, adapter in made.items()
            for name, value in arrays_of(adapter.parameters()).items()
            if _LEAF.match(f"{path}.{name}") and not name.startswith(("linear.", "embedding."))
        }
        misfits = _misfits(tensors, expected) + [f"{name} is missing" for name in expected if name not in tensors]
    _refuse(directory, misfits, len(tensors))
    return made


def _check_shapes(where: Path, tensors: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    _refuse(where, _misfits(tensors, expected), len(tensors))


def _misfits(tensors: dict[str, mx.array], expected: dict[str, mx.array]) -> list[str]:
    misfits = []
    for name, tensor in tensors.items():
        if name not in expected:
            misfits.append(f"the model has no {name}")
        elif tensor.shape != expected[name].shape:
            misfits.append(f"{name} has shape {tensor.shape}, the model's is {expected[name].shape}")
    return misfits


def _refuse(where: Path, misfits: list[str], count: int) -> None:
    if misfits:
        raise UserError(
            f"adapter {where} is for another model: {len(misfits):,} of its {count:,} tensors do not fit: "
            f"{first_few(misfits)}."
        )


def _rank_of(leaves: Mapping[str, Any]) -> int:
    factor = leaves["lora_a"]
    return (factor[0] if isinstance(factor, list) else factor).shape[1]


def _with_rank_and_scale(
    path: str, adapter: nn.Module, leaves: dict[str, Any], rank: int, scale: float
) -> dict[str, mx.array]:
    """Return an adapter's tensors, changed so that they give the same update with this rank and scale."""
    if _rank_of(leaves) == rank and adapter.scale == scale:
        return arrays_of(leaves)
    if not isinstance(adapter, Adapter):
        raise UserError(f"{path}: {type(adapter).__name__} has another rank or scale than the rest; give all the same.")
    for name in _FACTORS:
        leaves[name] = _padded(leaves[name], _axis(name, leaves[name]), rank)
    leaves["lora_b"] = leaves["lora_b"] * (adapter.scale / scale)
    return leaves


def _without_padding(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors of an adapter, by full path, without the last ranks in which both factors are zero.

    Such a rank adds nothing and gets no gradient. One rank is left in any case.
    """
    cut = dict(tensors)
    for name, a in tensors.items():
        path, _, leaf = name.rpartition(".")
        b = tensors.get(f"{path}.lora_b")
        if leaf != "lora_a" or b is None or a.ndim not in (2, 3) or b.ndim != a.ndim:
            continue
        rank = a.shape[1]
        axis = _axis("lora_b", b)
        if b.shape[axis] == rank and not mx.any(a[:, -1] != 0) and not mx.any(mx.take(b, rank - 1, axis=axis) != 0):
            used = np.flatnonzero(_is_used(a, 1) | _is_used(b, axis))
            rank = int(used[-1]) + 1 if used.size else 1
            cut[name] = _first(a, 1, rank)
            cut[f"{path}.lora_b"] = _first(b, axis, rank)
    return cut


def _fitted(name: str, tensor: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return a factor of a saved adapter with the rank of `shape`, or as it is if more than zeros would be cut off."""
    leaf = name.rpartition(".")[2]
    if leaf not in _FACTORS or tensor.ndim != len(shape) or tensor.ndim not in (2, 3):
        return tensor
    axis = _axis(leaf, tensor)
    rank = shape[axis]
    if tensor.shape[axis] <= rank or _is_used(tensor, axis)[rank:].any():
        return tensor
    return _first(tensor, axis, rank)


def _axis(leaf: str, factor: mx.array) -> int:
    """The axis of a factor that is as long as the rank."""
    if leaf == "lora_a":
        return 1
    return 2 if factor.ndim == 3 else 0


def _is_used(factor: mx.array, axis: int) -> np.ndarray:
    """Which ranks of a factor hold a number other than zero."""
    return as_numpy(mx.any(factor != 0, axis=[other for other in range(factor.ndim) if other != axis]))


def _first(factor: mx.array, axis: int, rank: int) -> mx.array:
    return mx.contiguous(mx.take(factor, mx.arange(rank), axis=axis))


def _padded(factor: mx.array, axis: int, rank: int) -> mx.array:
    widths = [(0, 0)] * factor.ndim
    widths[axis] = (0, rank - factor.shape[axis])
    return mx.pad(factor, widths)
