"""Writes rows for new tokens as PEFT's `trainable_token_indices`, and reads them back.

Both sides train such rows alone and keep them beside the table: here as rows behind the old ones, in PEFT as values
that replace the rows of given indices in a resized table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..lora.new_rows import add_rows, grown_tables
from ..lora.weights import dense_rows, is_quantized
from .module_names import Places, TransformersNames, short

OPTION = "trainable_token_indices"
_ROWS = ".token_adapter.trainable_tokens_delta"
# PEFT saves whole tables too where it sees that the base was resized: `save_embedding_layers` is "auto" by default.
_WHOLE_TABLES = (".token_adapter.base_layer.weight", ".base_layer.weight", ".weight")
_TABLES = ("embed_tokens", "lm_head")


def to_peft_rows(
    model: nn.Module, names: TransformersNames, root: str
) -> tuple[dict[str, mx.array], dict[str, list[int]], list[str]]:
    """Convert the rows for new tokens of a model; a head with a bias, for which PEFT has none, is a UserError.

    Returns the tensors by PEFT's names behind `root`, the content of `trainable_token_indices`, and sentences for the
    user.
    """
    tensors: dict[str, mx.array] = {}
    indices: dict[str, list[int]] = {}
    rows = 0
    grows = False
    for path, table in grown_tables(model).items():
        if "new_bias" in table:
            raise UserError(
                f"{path}: the adapter has new entries of a bias, for which PEFT has no form. Write a full checkpoint "
                "with --to merged."
            )
        module = names.place(path).module
        rows = table.rows
        tensors[f"{root}.{module}{_ROWS}"] = table.new_rows
        indices[short(module)] = list(range(table.first, table.end))
        grows = rows > table.base["weight"].shape[0]
    if not indices:
        return {}, {}, []
    resize = f"call model.resize_token_embeddings({rows}) before PeftModel.from_pretrained, and " if grows else ""
    count = len(next(iter(indices.values())))
    return tensors, indices, [f"The adapter has rows for {count:,} new tokens: {resize}take the tokenizer of the run."]


def take_rows(
    tensors: dict[str, mx.array],
    config: Mapping[str, Any],
    places: Places,
    modules: Mapping[str, nn.Module],
    where: Path,
) -> dict[str, mx.array]:
    """Take the rows for new tokens, and tables that PEFT saved whole with them, out of the tensors of an adapter.

    `config` is the content of its adapter_config.json, and `where` its folder. Returns the rows behind the last row of
    each table, by paths of MLX. Rows of tokens that the model has already, or of one of two tables, are a UserError.
    """
    option = config.get(OPTION)
    if not option:
        _drop_whole_tables(tensors, places, modules, where)
        return {}
    indices = option if isinstance(option, dict) else {"embed_tokens": option}
    by_key = {_key(name, _ROWS): tensors.pop(name) for name in list(tensors) if name.endswith(_ROWS)}
    if "embed_tokens" in by_key and ("lm_head", None, None) not in places:
        # PEFT may save the rows of a head that is tied to the embedding a second time.
        head = by_key.pop("lm_head", by_key["embed_tokens"])
        if not mx.array_equal(head, by_key["embed_tokens"]).item():
            raise UserError(
                f"adapter {where}: the model's head is tied to its embedding, and the adapter has other new rows for "
                "each. Merge it with PEFT (merge_and_unload) instead."
            )
    tables = {key: path for key in _TABLES if (path := places.get((key, None, None))) is not None}
    if by_key.keys() != tables.keys():
        raise UserError(
            f"adapter {where}: {OPTION} is {option!r}, and the adapter has new rows of "
            f"{' and '.join(by_key) or 'no table'}; expected {' and '.join(tables)}."
        )
    rows = {
        path: _sorted_rows(by_key[key], _indices(indices, key), modules[path], key, where)
        for key, path in tables.items()
    }
    counts = {key: len(rows[path]) for key, path in tables.items()}
    _drop_whole_tables(tensors, places, modules, where, counts)
    return rows


def _key(name: str, ending: str) -> str:
    """The short path of the module to which the tensor `name` with this ending belongs."""
    return short(name.removesuffix(ending).removeprefix("base_model.").removeprefix("model."))


def _indices(by_table: Mapping[str, list[int]], key: str) -> list[int]:
    """The indices of the table `key`, which PEFT finds by the end of its path."""
    return next((value for name, value in by_table.items() if f".{name}".endswith(f".{key}")), [])


def _sorted_rows(rows: mx.array, indices: list[int], table: nn.Module, key: str, where: Path) -> mx.array:
    """The rows in the order of their tokens. UserError unless these follow the last token of the table."""
    first = table["weight"].shape[0]
    if sorted(indices) != list(range(first, first + len(rows))):
        raise UserError(
            f"adapter {where}: {OPTION} of {key} is {indices}; an adapter of MLX has rows for new tokens alone, whose "
            f"indices start at {first} here. Merge it with PEFT (merge_and_unload) instead."
        )
    order = sorted(range(len(indices)), key=lambda position: indices[position])
    return rows[mx.array(order)].astype(mx.float32)


def _drop_whole_tables(
    tensors: dict[str, mx.array],
    places: Places,
    modules: Mapping[str, nn.Module],
    where: Path,
    new_rows: Mapping[str, int] = {},
) -> None:
    """Remove the tables that PEFT saved whole, each after a look whether its rows are the model's own.

    PEFT saves them beside new rows, and where embeddings have a low-rank update. `new_rows` counts those of a table
    that the adapter holds by themselves too.
    """
    embedding = places.get(("embed_tokens", None, None), "")
    for name in [name for name in tensors if name.endswith(_WHOLE_TABLES)]:
        key = _key(name, next(ending for ending in _WHOLE_TABLES if name.endswith(ending)))
        table = modules.get(places.get((key, None, None), embedding))
        if key in _TABLES and table is not None:
            _check_whole_table(name, tensors[name], table, new_rows.get(key, new_rows.get("embed_tokens", 0)), where)
            del tensors[name]


def _check_whole_table(name: str, saved: mx.array, table: nn.Module, new_rows: int, where: Path) -> None:
    """Raise UserError unless the table `saved` is the model's with so many new rows behind it."""
    if is_quantized(table):
        raise UserError(
            f"adapter {where}: {name} is a whole table, and the model's is quantised, so that the two cannot be "
            "compared. Save the adapter with save_pretrained(..., save_embedding_layers=False)."
        )
    ours = dense_rows(table)
    if len(saved) > len(ours) + new_rows:
        raise UserError(
            f"adapter {where}: {name} has {len(saved):,} rows, and the model's table {len(ours):,}; an adapter of MLX "
            "has further rows only where PEFT trained them as trainable_token_indices. Merge it with PEFT "
            "(merge_and_unload) instead."
        )
    if not mx.array_equal(saved[: len(ours)].astype(ours.dtype), ours).item():
        raise UserError(
            f"adapter {where}: the old rows of {name} are not the model's; an adapter of MLX leaves them as they are. "
            "Merge it with PEFT (merge_and_unload) instead."
        )


def install_rows(model: nn.Module, rows: Mapping[str, mx.array]) -> None:
    """Add rows for new tokens to the tables of `model`, by path; rows of another width are a UserError."""
    add_rows(model, {path: len(values) for path, values in rows.items()})
    for path, table in grown_tables(model).items():
        if rows[path].shape != table.new_rows.shape:
            raise UserError(
                f"{path}: the adapter's rows for new tokens have {rows[path].shape[1]} columns, the model's "
                f"{table.new_rows.shape[1]}; it is for another model."
            )
        table.new_rows = rows[path]
