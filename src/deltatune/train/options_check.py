"""Refuses options with which a run could not begin or would do nothing, and a model that trains something else.

Rows are refused that are longer than a model's table of learned positions, or than its rotary positions stay the same.
MLX reads beyond an array's end without an error: the loss would be NaN, or made of whatever lies there. Dynamic scaling
gives every token of a long row other positions, by the length of the row with its padding.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..data.batches.batch import bucket_widths
from ..errors import UserError
from ..layers import layer_paths, without_pictures
from ..lora import Adapter, adapters
from ..lora.adapter_files import check_file
from ..lora.convert import whole_modules, without_adapters
from ..lora.new_rows import grown_tables, row_count
from ..lora.select import select
from ..lora.weights import is_quantized
from ..machine.environment import expanded
from ..models.vocabulary import token_tables
from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from
from ..ops.watched_calls import calls_through
from ..options.conditions import TRAINING, Facts, changed_options, refuse_unread
from ..options.config import TrainConfig
from .policy_loss import variant_of
from .preferences.objectives import objective_of
from .tree import leaves
from .updates.optimizer import build_optimizer

# Of these, one step moves a number by about the learning rate whatever its gradient is.
_STEP_IS_RATE = ("adam", "adamw", "adam8bit", "adamw8bit", "adamax", "lion", "muon")
# A thousand times a usual rate for adapters.
_LARGEST_USUAL = 0.1


def check_options(config: TrainConfig) -> list[str]:
    """Refuse options that are unknown, wrong or not read, and a run without an update; return notes on unlikely ones.

    The model and the data need not be known.
    """
    refuse_unread(TRAINING, changed_options(config), config, Facts())
    build_optimizer(config)
    if config.resume_adapter_file is not None:
        check_file(Path(config.resume_adapter_file))
    _check_sample_prompts(config.sample_prompts)
    objective_of(config)
    if config.loss == "grpo":
        variant_of(config)
    if config.epochs is None:
        check_updates(config)
    schedule = config.lr_schedule
    rate: float = schedule["arguments"][0] if isinstance(schedule, dict) else config.learning_rate
    if config.optimizer.lower() in _STEP_IS_RATE and rate > _LARGEST_USUAL:
        return [
            f"Note: the learning rate is {rate:g}, and a step of {config.optimizer} moves every trained number by "
            "about as much; usual rates are 1e-5 to 1e-3."
        ]
    return []


def _check_sample_prompts(entries: Sequence[str]) -> None:
    """Refuse a file of prompts that is missing, and the name of another file, which would be asked as a prompt."""
    for entry in entries:
        is_file = os.path.isfile(expanded(entry))
        if entry.endswith(".jsonl") and not is_file:
            raise UserError(f"sample_prompts: {entry}: no such file; give one with a prompt in each row.")
        if is_file and not entry.endswith(".jsonl"):
            raise UserError(f"sample_prompts: {entry} is a file; a file of prompts has a name that ends with .jsonl.")


def check_updates(config: TrainConfig) -> None:
    """Refuse a run of `config.iters` iterations without an update, or with a single one at a learning rate of 0."""
    accumulated = config.grad_accumulation_steps
    iterations = config.iters
    if iterations < accumulated:
        raise UserError(
            f"grad_accumulation_steps: {accumulated:,} iterations make one update, and the run has {iterations:,}, so "
            f"it would change nothing. Give {iterations} or fewer, or more iters or epochs."
        )
    if iterations // accumulated == 1 and build_optimizer(config).learning_rate.item() == 0:
        raise UserError(
            "lr_schedule: the run makes one update, and its learning rate is 0, so it would change nothing. Give more "
            "iterations, or no warmup."
        )


_CALL = (
    "load the model anew and call convert_to_lora(model, config.lora_parameters, fine_tune_type=config.fine_tune_type, "
    "num_layers=config.num_layers, parts=config.trained_parts)"
)
_CHOICE = {"keys", "exclude", "layers", "layer_kinds", "num_layers", "parts"}


def check_trainable(model: nn.Module, config: TrainConfig) -> None:
    """Refuse a model whose trainable parameters are not those of the options.

    The kind of training is compared always; the choice of modules, the ranks, scales and dropout of adapters
    where their options are not at the defaults, which leave them to convert_to_lora.
    """
    kind = config.fine_tune_type
    by_path = adapters(model)
    kinds = {getattr(adapter, "kind", "lora") for adapter in by_path.values()} or {"full"}
    if kind != "full" and not by_path:
        raise UserError(
            f"fine_tune_type: {kind} trains adapters, and the model has no adapter: call convert_to_lora(model, "
            "config.lora_parameters, fine_tune_type=config.fine_tune_type, num_layers=config.num_layers) first, or set "
            "fine_tune_type='full'."
        )
    if kinds != {kind}:
        raise UserError(
            f"fine_tune_type: the options say {kind}, and the model trains {' and '.join(sorted(kinds))} adapters: set "
            f"fine_tune_type to that, or {_CALL}."
        )
    changed = set(changed_options(config))
    paths = list(by_path) or whole_modules(model, config.lora_parameters, config.num_layers, config.trained_parts)
    inside = tuple(f"{path}." for path in [*paths, *grown_tables(model)])
    trained = [name for name, _ in leaves(model.trainable_parameters())]
    outside = [name for name in trained if not name.startswith(inside)]
    if outside and not config.from_scratch:
        raise UserError(
            f"fine_tune_type: {kind} does not train {outside[0]}, which the model does: freeze it, or {_CALL}."
        )
    if by_path:
        _check_adapters(model, config, by_path, changed)
    elif changed & _CHOICE:
        _check_layers(model, paths, trained)


def _check_layers(model: nn.Module, paths: list[str], trained: list[str]) -> None:
    modules = dict(model.named_modules())
    for path in paths:
        holds = bool(leaves(modules[path].parameters())) and not is_quantized(modules[path])
        if holds and not any(name.startswith(f"{path}.") for name in trained):
            raise UserError(f"num_layers, layers and parts choose {path}, which does not train: {_CALL}.")


def _check_adapters(model: nn.Module, config: TrainConfig, by_path: dict[str, nn.Module], changed: set[str]) -> None:
    lora = config.lora_parameters
    ours = {path: adapter for path, adapter in by_path.items() if isinstance(adapter, Adapter)}
    ranks = dict.fromkeys(ours, lora.rank)
    # An adapter that a layer made by itself stands in the place of its base, which cannot be chosen a second time.
    if changed & (_CHOICE | {"rank_pattern"}) and len(ours) == len(by_path):
        with without_adapters(model):
            ranks = select(
                model,
                lora,
                dora=config.fine_tune_type == "dora",
                num_layers=config.num_layers,
                parts=config.trained_parts,
            ).ranks
        if changed & _CHOICE and ranks.keys() != ours.keys():
            path = sorted(ranks.keys() ^ ours.keys())[0]
            has = "has no adapter" if path in ranks else "has an adapter"
            names = ", ".join(sorted(changed & _CHOICE))
            raise UserError(f"{names}: {path} {has}, and the options say otherwise: {_CALL}.")
    for path, adapter in ours.items():
        values = {
            "rank": (adapter.rank, ranks.get(path, adapter.rank), {"rank", "rank_pattern"}),
            "scale": (adapter.scale, lora.scale_at(adapter.rank), {"scale", "alpha", "rslora"}),
            "dropout": (adapter.dropout_rate, lora.dropout, {"dropout"}),
        }
        for name, (actual, expected, options) in values.items():
            if changed & options and not math.isclose(actual, expected, rel_tol=1e-6):
                raise UserError(
                    f"{', '.join(sorted(changed & options))}: the options say {name} {expected:g}, and the adapter of "
                    f"{path} has {actual:g}: {_CALL}."
                )


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
