"""Chooses which layers stay on the disk where a model is evaluated, or asked, within so much memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from ..data.vision.media import largest_batch
from ..layers import describe
from ..machine import backend
from ..machine.compiling import without_kernels
from ..models.batch_decoder import PROMPT_TOKENS, is_covered, room_for
from ..models.generate import begun, cache_bytes, embedded, on_stream_of_answers
from ..models.head import PIECE, before_head, of_piece, split_head
from ..models.load import locate
from ..models.vision.split import frozen_tower, has_vision
from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from
from ..ops.recomputation import Checkpoints
from ..patches import patched
from ..patches.whole_rows import whole_rows
from ..train.batch_loss import loss_of
from ..train.by_layer.store import Store
from ..train.evaluation.evaluate import evaluating, inferring
from ..train.evaluation.inference import Prompt
from ..train.setup import Run, training
from ..train.tree import nbytes
from .array_layout import ArrayLayout
from .device_limits import brake
from .fit import Planner, shape
from .placement import Placement, PlannedPass, chosen, refusing_layouts
from .traced_layers import noted_calls, noted_passes, nothing_started
from .traced_step import blank_arrays, blank_batch, simulate_forward


def placed_evaluation(run: Run, stored: Store) -> Placement:
    """Choose which layers stay on the disk while `run.splits.test` is evaluated. Nothing is read.

    The run was loaded lazily, with the adapter if there is one. UserError where `run.config.memory` is too little.
    """
    config = run.config
    model = run.model
    memory = config.memory
    assert memory is not None
    order = run.order(run.splits.test)
    rows = config.batch_size // run.world.size
    length = order.widths[-1]
    trained_as = training(model, config, compare=False, checkpoints=Checkpoints())
    with refusing_layouts(), trained_as as trained, evaluating(model), whole_rows():
        documents = [document for example in run.splits.test for document in example.documents]
        blank = blank_batch(rows, length, config.pack)
        shapes = largest_batch(documents, rows)
        batch, features = blank_arrays(model, frozen_tower(model), blank, shapes)

        def peak(bound: int | None) -> int:
            with noted_passes(model, trained, "memory" if bound is None else None) as (passes, noted, _):
                with drawing_from(mx.random.key(0)):
                    outputs = loss_of(trained.loss, batch) if passes is None else passes.evaluate(batch)
                return max(_peak(model, [*noted, outputs], bound), _peak(model, [features], bound))

        planned = _planned(model, memory, peak, (rows, length), "a smaller --batch-size or --max-seq-length")
    return chosen(model, stored, memory, planned)


def placed_teacher(run: Run) -> tuple[Placement, list[str]]:
    """Prepare a run of distillation, and choose which layers of its teacher stay on the disk; nothing is read.

    The model that trains stays in memory. Returned beside the places are the lines to print from the preparation. A
    UserError says that `run.config.memory` is too little.
    """
    config, teacher = run.config, run.teacher
    assert config.memory is not None
    assert teacher is not None
    stored = Store(locate(config.teacher), teacher, trust_remote_code=config.trust_remote_code)
    stored.find(teacher)
    lines = run.prepare()
    rows, length = shape(run)
    with refusing_layouts():
        without_it = Planner(run, ArrayLayout.measured()).at(rows, length).bytes.amount
        with without_kernels(), patched(), undisturbed(teacher), nothing_started():
            backbone = split_head(teacher, compare=False).backbone
            assert backbone is not None

            def peak(bound: int | None) -> int:
                with _noted(teacher, by_layers=bound is None) as noted:
                    noted.append([backbone(mx.zeros((rows, length), mx.int32))])
                    of_pass = _peak(teacher, noted, None if bound is None else bound - without_it)
                    return without_it + of_pass

            smaller = "a smaller --batch-size or --max-seq-length"
            planned = _planned(teacher, config.memory, peak, (rows, length), smaller)
    placement = chosen(teacher, stored, config.memory, planned)
    return dataclasses.replace(placement, model=" of the teacher"), lines


def placed_answer(model: nn.Module, stored: Store, memory: int, prompt: Prompt, max_tokens: int) -> Placement:
    """Choose which layers of a lazily loaded model stay on the disk while it answers a prompt. Nothing is read.

    UserError where `memory`, in bytes, is too little.
    """
    tokens = len(prompt.tokens)
    decoder = model["language_model"] if has_vision(model) else model
    # A function of mx.compile is traced once for each stream, so the plan traces on the stream that answers run on.
    answering = on_stream_of_answers()
    with refusing_layouts(), without_kernels(), patched(), undisturbed(model), nothing_started(), answering:

        def peak(bound: int | None) -> int:
            with _noted(model, by_layers=bound is None) as noted:
                pictures = prompt.pictures
                held: list[mx.array] = []
                if pictures is not None:
                    held = embedded(model, prompt.tokens, pictures.images, pictures.videos)
                noted.append(held)
                for results in begun(decoder, tokens, most=max_tokens):
                    noted.append([*results, *held])
                return _peak(model, noted, bound)

        planned = _planned(model, memory, peak, (1, tokens), "a shorter prompt")
    return chosen(model, stored, memory, planned)


def placed_tasks(model: nn.Module, stored: Store, memory: int, rows: int, length: int) -> Placement:
    """Choose which layers of a lazily loaded model stay on the disk while it answers tasks of lm-eval.

    `rows` texts are scored, or prompts answered, at once; `length` counts the most tokens of one, the answer's
    included. Nothing is read. UserError where `memory`, in bytes, is too little.
    """
    with refusing_layouts(), without_kernels(), patched():

        def peak(bound: int | None) -> int:
            return max(_scoring(model, rows, length, bound), _answering(model, rows, length, bound))

        planned = _planned(model, memory, peak, (rows, length), "a smaller --batch-size or --max-seq-length")
    return chosen(model, stored, memory, planned)


def _scoring(model: nn.Module, rows: int, length: int, bound: int | None) -> int:
    """Return the peak of scoring continuations of so many texts (models.head), in bytes."""
    with evaluating(model), whole_rows():
        split = split_head(model, compare=False)
        piece = min(PIECE, length)
        with _noted(model, by_layers=bound is None) as noted:
            outputs = before_head(model, split, mx.zeros((rows, length), mx.int32))
            noted.append([outputs])
            noted.append([outputs, *of_piece(split, outputs[0, :piece], mx.zeros(piece, mx.int32))])
            return _peak(model, noted, bound)


def _answering(model: nn.Module, rows: int, length: int, bound: int | None) -> int:
    """Return the peak of answering so many prompts at once (models.batch_decoder), in bytes."""
    most = backend.here(PROMPT_TOKENS)
    read_at_once = max(1, min(rows, most // length)) if is_covered(model) else rows
    with inferring(model):
        caches = cache_bytes(model)
        # A step makes new caches of all rows from those before it.
        of_rows = 2 * rows * (caches.fixed + caches.token * room_for(length))
        with _noted(model, by_layers=bound is None) as noted:
            for results in begun(model, length, read_at_once, most):
                noted.append(results)
            return _peak(model, noted, None if bound is None else bound - of_rows) + of_rows


@contextmanager
def _noted(model: nn.Module, *, by_layers: bool) -> Iterator[list[list[mx.array]]]:
    """Yield a list of evaluations; if `by_layers`, the model's layers note theirs in it when they are called."""
    if not by_layers:
        yield []
        return
    with noted_calls([layer.module for layer in describe(model)]) as noted:
        yield noted


def _peak(model: nn.Module, noted: Sequence[Sequence[mx.array]], bound: int | None) -> int:
    """Return the peak of evaluations that follow each other, in bytes, all weights included.

    For a pass as a whole within `bound` bytes, MLX waits for queued work; None is for a pass by layers.
    """
    limit = None if bound is None else brake(bound)
    return simulate_forward(ArrayLayout.measured(), model.state, noted, limit).bytes


def _planned(
    model: nn.Module, memory: int, peak: Callable[[int | None], int], tokens: tuple[int, int], smaller: str
) -> PlannedPass:
    """Plan a pass as a whole, as it is computed where it fits, and else by layers.

    `peak` returns the bytes of the pass with all weights in memory, as a whole within so many bytes, or by layers.
    """
    if nbytes(model.parameters()) <= memory and (whole := peak(memory)) <= memory:
        return PlannedPass(whole, tokens, smaller)
    return PlannedPass(peak(None), tokens, smaller, whole=False)
