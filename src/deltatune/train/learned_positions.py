"""Refuses rows that are longer than a model's table of learned positions, or than its rotary positions stay the same.

MLX reads beyond an array's end without an error: the loss would be NaN, or made of whatever lies there. Dynamic scaling
gives every token of a long row other positions, by the length of the row with its padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..data.batches.batch import bucket_widths
from ..errors import UserError
from ..layers import layer_paths, without_pictures
from ..lora.new_rows import row_count
from ..models.vocabulary import token_tables
from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from
from ..ops.watched_calls import calls_through


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has learned a vector for; None for one that computes its positions.

    An embedding beside the layers is one of positions if it is asked for 0 and 1 where a row holds the token 1 twice.
    """
    inside = tuple(f"{path}." for path in layer_paths(model))
    of_tokens = set(map(id, token_tables(model).values()))
    tables = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        and id(module) not in of_tokens
        and not path.startswith(inside)
    ]
    counts: list[int] = []

    def noting(module: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments and arguments[0].reshape(-1).tolist() == [0, 1]:
            counts.append(row_count(module))
        return call(*arguments, **options)

    if tables:
        with drawing_from(mx.random.key(0)), undisturbed(model), calls_through(tables, noting):
            model(mx.array([[1, 1]], mx.int32), **without_pictures(model))
    return min(counts, default=None)


def unscaled_positions(model: nn.Module) -> int | None:
    """Return up to which length of a row a model's rotary positions do not depend on it; None where they never do."""
    counts = [
        module.max_position_embeddings
        for module in model.modules()
        if {"max_position_embeddings", "dims"} <= vars(module).keys() and _scales_by_length(module)
    ]
    return min(counts, default=None)


def _scales_by_length(rotary: nn.Module) -> bool:
    """Whether rotary positions beyond `max_position_embeddings` depend on the tokens that follow in the row."""
    with undisturbed(rotary):
        rotary.max_position_embeddings = 1
        x = mx.ones((1, 1, 3, rotary.dims))
        return not mx.allclose(rotary(x)[..., 1:2, :], rotary(x[..., 1:2, :], offset=1), atol=1e-4)


def check_positions(model: nn.Module, max_seq_length: int, examples: Iterable[Any]) -> None:
    """Refuse examples (with `positions` and `source`) for whose padded rows the model has too few positions."""
    most = learned_positions(model)
    why = "the model has learned {:,}"
    if most is None:
        most = unscaled_positions(model)
        why = "beyond {:,} the model's rotary positions depend on the length of the row, its padding included"
    if most is None or max_seq_length <= most:
        return
    widths = bucket_widths(max_seq_length)
    for example in examples:
        width = widths[min(bisect_left(widths, example.positions), len(widths) - 1)]
        if width > most:
            raise UserError(
                f"{example.source}: its row has {width:,} positions, and {why.format(most)}: give "
                f"--max-seq-length {most}."
            )
