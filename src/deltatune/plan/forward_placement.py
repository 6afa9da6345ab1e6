"""Chooses which layers stay on the disk where a model is evaluated, or asked, within so much memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx

from ..data.vision.media import largest_batch
from ..machine.compiling import without_kernels
from ..models.adapted_base import put_adapter
from ..models.generate import first_piece
from ..models.load import Loaded
from ..models.trained_checkpoint import is_trained_checkpoint
from ..models.vision.frozen_tower import frozen_tower
from ..ops.random_state import drawing_from
from ..patches import patched
from ..patches.whole_rows import whole_rows
from ..train.by_layer.stored_weights import StoredWeights
from ..train.evaluate import evaluating
from ..train.setup import Run, training
from ..train.step import loss_of
from .array_layout import ArrayLayout
from .placement import Placed, PlannedPass, chosen, refusing_layouts
from .traced_step import blank_arrays, blank_batch, simulate_forward


def placed_evaluation(run: Run, adapter_path: str | None) -> Placed:
    """Choose which layers stay on the disk while `run.splits.test` is evaluated. Nothing is read.

    Args:
        run: A run that was loaded lazily, without an adapter.
        adapter_path: The folder of the adapter, which is put on its model; None for the model alone.

    Raises:
        UserError: `run.config.memory` is too little.
    """
    config, model = run.config, run.model
    assert config.memory is not None
    stored = _prepared(run.loaded, adapter_path, trust_remote_code=config.trust_remote_code)
    order = run.order(run.splits.test)
    rows, length = config.batch_size // run.world.size, order.widths[-1]
    plain = dataclasses.replace(config, grad_checkpoint=False)
    with refusing_layouts(), training(model, plain, compare=False) as trained, evaluating(model), whole_rows():
        documents = [document for example in run.splits.test for document in example.documents]
        blank, shapes = blank_batch(rows, length, config.pack), largest_batch(documents, rows)
        batch, features = blank_arrays(model, frozen_tower(model), blank, shapes)
        with drawing_from(mx.random.key(0)):
            outputs = loss_of(trained.loss, batch)
        forwards = [simulate_forward(ArrayLayout.measured(), model.state, results) for results in (outputs, features)]
        peak = max(forward.bytes.amount for forward in forwards)
    smaller = "a smaller --batch-size or --max-seq-length"
    return Placed(chosen(model, stored, config.memory, PlannedPass(peak, (rows, length), smaller)), [], stored)


def placed_answer(
    loaded: Loaded, adapter_path: str | None, memory: int, tokens: int, most: int, *, trust_remote_code: bool
) -> Placed:
    """Choose which layers stay on the disk while a model answers a prompt. Nothing is read.

    Args:
        loaded: A model that was loaded lazily, without an adapter.
        adapter_path: The folder of the adapter, which is put on it; None for the model alone.
        memory: What may be held, in bytes.
        tokens: How many tokens the prompt has.
        most: The largest number of tokens in the answer.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Raises:
        UserError: `memory` is too little.
    """
    model = loaded.model
    stored = _prepared(loaded, adapter_path, trust_remote_code=trust_remote_code)
    with refusing_layouts(), without_kernels(), patched():
        piece, outputs, caches = first_piece(model, tokens)
        peak = simulate_forward(ArrayLayout.measured(), model.state, [*outputs, *caches]).bytes.amount
    # Caches grow with the tokens that follow; those of recurrent layers do not, and are counted as if they did.
    peak += sum(array.nbytes for array in caches) * (tokens + most - piece) // piece
    return Placed(chosen(model, stored, memory, PlannedPass(peak, (1, piece), "a shorter prompt")), [], stored)


def _prepared(loaded: Loaded, adapter_path: str | None, *, trust_remote_code: bool) -> StoredWeights:
    """Put the adapter on the model, of which nothing trains; return which of its arrays lie in files."""
    stored = StoredWeights(loaded.path, loaded.model, trust_remote_code=trust_remote_code)
    if adapter_path and not is_trained_checkpoint(Path(adapter_path)):
        put_adapter(loaded, adapter_path)
    loaded.model.freeze()
    loaded.model.eval()
    stored.find(loaded.model)
    return stored
