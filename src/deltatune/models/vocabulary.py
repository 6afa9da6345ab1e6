"""Compares token ids, of a tokenizer and of data, with the rows of a model's embedding and output head.

MLX reads and writes beyond an array's end without an error, so an id without a row must never reach the model. Such ids
come from tokens that were added to a tokenizer after its model was made; `resize_embeddings` adds rows for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from ..layers import layer_paths, logits_of, without_pictures
from ..lora.adapter import Adapter
from ..lora.new_rows import GrownEmbedding, GrownLinear, GrownTable, add_rows, grown_tables, row_count, table_kind
from ..lora.weights import dense_rows
from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from
from ..ops.watched_calls import calls_through
from ..upstream import hugging_face_tokenizer
from .load import Loaded, new_model

_REMEDY = (
    "Train with --resize-embeddings, which adds rows for such tokens, or take the tokenizer that belongs to the model."
)
# With fewer spare rows than this, there is nothing to compare with.
_SPARE = 2
# The parts of config.json, beside its top level, that may hold the language model's vocab_size.
_TEXT_PARTS = ("text_config", "language_config", "llm_config")


def token_tables(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with a row for each token by path: the embedding, and the output head unless the embedding
    serves.

    They stand beside the layers, or beside a module that holds the layers: the embedding with the most rows, and the
    linear modules with as many.
    """
    modules: dict[str, nn.Module] = {}
    owner: Any = model
    steps = layer_paths(model)[0].split(".")
    for depth, step in enumerate(steps):
        path = "".join(f"{name}." for name in steps[:depth])
        modules |= {f"{path}{name}": child for name, child in owner.items() if isinstance(child, nn.Module)}
        owner = owner.get(step)
        if not isinstance(owner, nn.Module):
            break
    embeddings = {path: module for path, module in modules.items() if _kind(module) is GrownEmbedding}
    embeddings = embeddings or _called_with_ids(model)
    if not embeddings:
        raise UserError(f"{type(model).__module__}: this model has no embedding of tokens beside its layers.")
    largest = max(embeddings, key=lambda path: row_count(embeddings[path]))
    rows = row_count(embeddings[largest])
    heads = {path: module for path, module in modules.items() if _kind(module) is GrownLinear}
    return {largest: embeddings[largest]} | {path: head for path, head in heads.items() if row_count(head) == rows}


def _called_with_ids(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold a matrix and are called with the token ids themselves, by path.

    This finds an embedding inside a module of its own, or of a class of its own. No product is computed.
    """
    ids = mx.array([[3, 5]])
    inside = tuple(f"{path}." for path in layer_paths(model))
    paths = {
        id(module): path
        for path, module in model.named_modules()
        if not path.startswith(inside) and isinstance(module.get("weight"), mx.array) and module["weight"].ndim == 2
    }
    called: dict[str, nn.Module] = {}

    def noting(module: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments and mx.array_equal(arguments[0], ids):
            called[paths[id(module)]] = module
        return call(*arguments, **options)

    watched = calls_through([module for module in model.modules() if id(module) in paths], noting)
    with drawing_from(mx.random.key(0)), undisturbed(model), watched:
        model(ids, **without_pictures(model))
    return called


def _kind(module: nn.Module) -> type[GrownTable] | None:
    if isinstance(module, GrownTable):
        return type(module)
    return _kind(module.base) if isinstance(module, Adapter) else table_kind(module)


def token_rows(model: nn.Module) -> int:
    """Return the number of rows of the model's embedding, which is above every token id that the model knows."""
    return row_count(next(iter(token_tables(model).values())))


def check_examples(model: nn.Module, tokenizer: Any, examples: Iterable[Any]) -> None:
    """Refuse examples with a token for which the model has no row, naming the first `source` and token."""
    rows = token_rows(model)
    for example in examples:
        _check_tokens(example.tokens, example.source, tokenizer, rows)


def check_prompt(model: nn.Module, tokenizer: Any, tokens: Sequence[int], source: str = "--prompt") -> None:
    """Check that the model has a row for every token of a prompt. UserError, naming `source`, where it has not."""
    _check_tokens(np.array(tokens), source, tokenizer, token_rows(model))


def tokens_without_row(model: nn.Module, tokenizer: Any) -> str | None:
    """Return a sentence on the tokens of a tokenizer for which a model has no row, or None if it has rows for all."""
    rows = token_rows(model)
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if not beyond:
        return None
    number, token = beyond[0]
    count = "1 token" if len(beyond) == 1 else f"{len(beyond):,} tokens"
    return (
        f"the embedding has {rows:,} rows, and {count} of the tokenizer have ids beyond them, the first {token!r} (id "
        f"{number:,}): no text with such a token can be trained. {_REMEDY}"
    )


def _check_tokens(tokens: np.ndarray, where: str, tokenizer: Any, rows: int) -> None:
    if tokens.max() < rows:
        return
    number = int(tokens[tokens >= rows][0])
    raise UserError(
        f"{where}: the token {tokenizer.convert_ids_to_tokens(number)!r} has the id {number:,}, and the model's "
        f"embedding has {rows:,} rows, for ids 0 to {rows - 1:,}. {_REMEDY}"
    )


def resize_embeddings(loaded: Loaded, scratch_seed: int | None = None, *, lazy: bool = False) -> None:
    """Give a model's embedding and head, in place, trainable rows for tokens added to its tokenizer.

    These are the ids without a row, and added tokens in rows that the base has to spare. `loaded.config` then says how
    many rows there are. Nothing changes if there is a trained row for every token. The model has no adapters. With
    `scratch_seed` it trains from scratch and is made anew with more rows, drawn when they are used if `lazy`; else new
    rows start at the mean of the old ones.
    """
    tables = token_tables(loaded.model)
    rows = token_rows(loaded.model)
    needed = max(loaded.tokenizer.get_vocab().values()) + 1
    first = _first_new_row(loaded.model, loaded.tokenizer, scratch_seed is not None)
    if needed <= first:
        return
    total = max(rows, needed)
    loaded.config = with_vocab_size(loaded.config, rows, total)
    if scratch_seed is not None:
        loaded.model = new_model(loaded.config, scratch_seed, lazy=lazy, vision=loaded.processor is not None)
    else:
        add_rows(loaded.model, dict.fromkeys(tables, needed - first), first)
    with undisturbed(loaded.model):
        # Nothing is computed: the shape is known without evaluation.
        columns = logits_of(loaded.model, mx.zeros((1, 2), mx.int32)).shape[-1]
    if not token_rows(loaded.model) == columns == total:
        raise UserError(
            f"resize_embeddings: {type(loaded.model).__module__} does not follow: for {needed:,} tokens it has "
            f"{token_rows(loaded.model):,} rows and gives {columns:,} logits. Take a tokenizer without added tokens."
        )


def lacks_rows(model: nn.Module, tokenizer: Any, *, from_scratch: bool = False) -> bool:
    """Return whether resize_embeddings() would give a model rows that it has not."""
    needed = max(tokenizer.get_vocab().values()) + 1
    return not grown_tables(model) and needed > _first_new_row(model, tokenizer, from_scratch)


def _first_new_row(model: nn.Module, tokenizer: Any, from_scratch: bool) -> int:
    """Return the first of the added tokens at the end of the vocabulary with untrained rows; the row count without any.

    A checkpoint does not say which tokens were added to it, but its spare rows, which no token has, show the values of
    untrained rows (arXiv 2405.05417 finds such tokens so). Without spare rows it cannot be told.
    """
    table = next(iter(token_tables(model).values()))
    rows = row_count(table)
    added = hugging_face_tokenizer(tokenizer).added_tokens_decoder.keys()
    last = max(tokenizer.get_vocab().values())
    if from_scratch or rows - last <= _SPARE:
        return rows
    table = table.base if isinstance(table, Adapter) else table
    spare = dense_rows(table, last + 1, rows).astype(mx.float32)
    centre = spare.mean(axis=0)
    reach = 2 * mx.linalg.norm(spare - centre, axis=-1).max()
    first = last + 1
    while first - 1 in added:
        row = dense_rows(table, first - 1, first).astype(mx.float32)
        if (mx.linalg.norm(row - centre) > reach).item():
            break
        first -= 1
    return rows if first > last else first


def with_vocab_size(config: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """Return a copy of the content of config.json where every vocab_size of `old` is `new`; there is one at least."""
    config = copy.deepcopy(config)
    parts = [config, *(config[name] for name in _TEXT_PARTS if isinstance(config.get(name), dict))]
    for part in [part for part in parts if part.get("vocab_size") == old] or parts[-1:]:
        part["vocab_size"] = new
    return config
