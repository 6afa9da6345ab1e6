"""Writes a model that was trained as a whole, without adapters: the base's checkpoint with the trained values.

Tensors keep the base's names and layout, and those left out of the loaded model are copied (vision towers, multi-token
prediction), so that every reader of the base reads the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..lora.adapter_files import RUN_OPTIONS
from ..lora.new_rows import grown_tables, plain_parameters
from ..lora.tensor_files import Header, StoredTensor, write_tensors
from ..machine import atomic_files
from ..machine.json_files import read_json
from ..ops.functional import arrays_of
from .checkpoint_files import WEIGHTS, weight_headers
from .checkpoint_writer import Changes, take_tensors, unwritten_ends, write_picture_options, write_rest
from .stored_names import StoredNames
from .vision.split import has_vision
from .vocabulary import with_vocab_size

#: The file with all weights. One file is replaced in one move, so that no checkpoint mixes the weights of two saves.
FILE = "model.safetensors"


class TrainedCheckpoint:
    """The checkpoint of a model that trains as a whole, ready to train, by the folder from which it was loaded.

    A model that began with random weights has no layout but MLX's own; `scratch_config` is its config.json, None for
    any other model. `note` is a sentence for the user where the weights cannot have the base's layout, else None.
    """

    def __init__(self, model: nn.Module, base: Path, scratch_config: Mapping[str, Any] | None = None):
        self._model = model
        self._base = base
        self._config = grown_config(model, base) if scratch_config is None else _scratch_config(model, scratch_config)
        self._names: StoredNames | None = None
        self._ends = unwritten_ends(base)
        self.note: str | None = None
        if scratch_config is not None:
            return
        try:
            self._names = StoredNames(model, base)
            self._names.write_back(self._trained(), [])
        except UserError as error:
            self._names = None
            self.note = f"{FILE} will have MLX's names, and only the tensors that this run loads: {error}"

    def write(self, folder: Path, options: Mapping[str, Any]) -> None:
        """Write the present values into a folder, file by file, with the run's options for exports."""
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_file(folder / FILE, self._write_weights)
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


def _scratch_config(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without a vision tower where the model was made without one, since its weights will be missing."""
    return {key: value for key, value in config.items() if key != "vision_config" or has_vision(model)}


def is_trained_checkpoint(folder: Path) -> bool:
    """Whether a run that trained a whole model wrote into `folder`."""
    return (folder / RUN_OPTIONS).is_file() and any(True for _ in folder.glob(WEIGHTS))


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
