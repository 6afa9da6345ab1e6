"""Brings deltatune's gradients into the models of other packages by replacing functions of those packages.

Patches are in force within `patched` blocks alone, after which every original is restored. The modules of tables/ list
the functions to replace; patch.py replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import mlx.nn as nn

from ..layers import gated_delta_layers
from ..machine import backend
from . import patch
from .patch_record import ALWAYS, INFERENCE, PACKING, TRAINING, Patch
from .patch_report import PatchReport, PatchWarning, explain, refuse, serving
from .recurrence import served
from .tables import (
    attention,
    delta_layers,
    experts,
    mlx_lm,
    mlx_vlm,
    one_row_products,
    pointwise,
    products,
    state_space,
)

__all__ = [
    "ALWAYS",
    "INFERENCE",
    "PACKING",
    "PATCHES",
    "TRAINING",
    "Patch",
    "PatchReport",
    "PatchWarning",
    "left_alone_for",
    "patched",
    "refuse",
    "served",
    "serving",
]

# Patches for every device. Where two records fit one version of a target, the first one is applied, so the records that
# correct results stand before those that save time.
PATCHES: tuple[Patch, ...] = (
    *mlx_lm.PATCHES,
    *mlx_vlm.PATCHES,
    *state_space.PATCHES,
    *experts.PATCHES,
    *mlx_lm.RESIDUAL_WEIGHTS,
    *attention.PATCHES,
    *attention.LATENT,
    *products.PACKED,
)

# Further patches, applied only where MLX computes on an NVIDIA GPU, on an Apple GPU, or on a CPU.
ON_CUDA: tuple[Patch, ...] = (
    *pointwise.ACTIVATIONS,
    *pointwise.PATCHES,
    pointwise.ATTENTION,
    *delta_layers.PATCHES,
    *pointwise.NORMS,
    *products.WITHOUT_GAPS,
    *products.SORTED_ROWS,
)
ON_METAL: tuple[Patch, ...] = (
    *delta_layers.PATCHES,
    *pointwise.ACTIVATIONS,
    *pointwise.ACTIVATIONS_OF_MLX_VLM,
    pointwise.NORM,
    pointwise.ATTENTION,
    *products.SORTED_ROWS,
)
ON_CPU: tuple[Patch, ...] = products.NARROW

# The `patched` blocks that are open.
_open: set[object] = set()


def _of_device() -> tuple[Patch, ...]:
    return backend.here({"cpu": ON_CPU, "cuda": ON_CUDA, "metal": ON_METAL})


def _records() -> tuple[Patch, ...]:
    return (*one_row_products.records(), *_of_device(), *PATCHES)


def left_alone_for(uses: Collection[str]) -> PatchReport:
    """Report functions left alone on which results of these uses may depend, without a warning.

    Modules that are not imported yet are not asked. Afterwards no more patches are in force than before.
    """
    products = one_row_products.records()
    if products:
        # The small cases of the others multiply, too.
        patch.apply(products)
    try:
        report = patch.preview(_records())
    finally:
        if products and not _open:
            patch.revert()
    report.left_alone = [left for left in report.left_alone if set(left.patch.needed_for) & set(uses)]
    return report


@contextmanager
def patched(
    model: nn.Module | None = None,
    announce: Callable[[PatchReport], None] | None = None,
    *,
    strict: bool = True,
    uses: Collection[str] = (TRAINING,),
    rows: int = 1,
) -> Iterator[PatchReport]:
    """Apply the patches within a `with` block, so that gated-delta layers train with deltatune's gradients there.

    Some patches depend on the device; each module of the folder tables/ says where its own are needed. Functions of
    modules that are imported inside the block are patched too. Blocks may be nested: the patches are reverted when the
    last block ends. A warning (PatchWarning) names every target that is left alone.

    Args:
        model: A model to verify. It is traced, and each gated-delta layer that does not call deltatune is reported.
        announce: Is called with a further report whenever the module of a waiting target is imported later.
        strict: Whether to raise where the uses of the model depend on something that is left alone, or a layer does
            not call deltatune; if not, the call only warns.
        uses: The uses of the model: TRAINING, PACKING, INFERENCE. Layers are traced for TRAINING.
        rows: The rows of a batch, with which `model` is traced.

    Yields:
        A report of the functions that were patched, those left alone, and the modules that are not imported yet.

    Raises:
        UserError: The BLAS of this machine computes wrong products that no patch can correct; or see `strict`. No
            patch is then in force that was not before.

    Example:
        >>> with patched(model) as report:
        ...     train(model)
        >>> print(report)
    """
    block = object()
    _open.add(block)
    try:
        report = patch.apply(_records(), announce)
        if model is not None and TRAINING in uses:
            layers = gated_delta_layers(model)
            report.serving = serving(model, rows)
            report.unreached += [
                explain(path, layers[path]) for path, serves in report.serving.delta.items() if not serves
            ]
        if model is not None and strict:
            refuse(report, model, uses)
        patch.warn(report)
        yield report
    finally:
        _open.discard(block)
        if not _open:
            patch.revert()
