"""Patches that bring deltatune's gradients into other packages' models: applied explicitly, reverted exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.nn as nn

from ..layers import gated_delta_layers, is_gated_delta
from ..machine import backend
from . import patch
from .patch import Patch, PatchReport, PatchWarning
from .recurrence import served
from .tables import experts, loading, mlx_lm, mlx_vlm, one_row_products, pointwise, quantized_product, sorted_rows
from .verify import explain, reached

__all__ = [
    "PATCHES",
    "Patch",
    "PatchReport",
    "PatchWarning",
    "apply",
    "gated_delta_layers",
    "is_gated_delta",
    "patched",
    "reached",
    "revert",
    "served",
]

# Where two records fit one version of a target, the first is taken: what trains right before what trains fast.
PATCHES: tuple[Patch, ...] = (*mlx_lm.PATCHES, *mlx_vlm.PATCHES, *experts.PATCHES)

# Where MLX computes on an NVIDIA GPU, on an Apple GPU, and on a CPU.
ON_CUDA: tuple[Patch, ...] = (*pointwise.PATCHES, *loading.PATCHES, *sorted_rows.PATCHES, *quantized_product.PATCHES)
ON_METAL: tuple[Patch, ...] = sorted_rows.PATCHES
ON_CPU: tuple[Patch, ...] = quantized_product.PATCHES

_depth = 0


def _of_device() -> tuple[Patch, ...]:
    return {"cpu": ON_CPU, "cuda": ON_CUDA, "metal": ON_METAL}[backend.device()]


def apply(model: nn.Module | None = None, announce: Callable[[PatchReport], None] | None = None) -> PatchReport:
    """Put every patch in force; harmless when they are. With `model`, trace it to see that each layer is reached.

    `announce` gets a report for each target whose module is imported only later. Warns (PatchWarning) about whatever
    stays on other code. On a CPU whose BLAS computes one-row products wrong, those go another way (one_row); on
    an NVIDIA GPU, so do activations and norms (pointwise), and experts are laid out anew (loading); on any GPU, so are
    their rows (sorted_rows). On CPUs and NVIDIA GPUs packed matrices are unpacked before they meet many rows (packed).
    """
    report = patch.apply((*one_row_products.records(), *_of_device(), *PATCHES), announce)
    if model is not None:
        layers = gated_delta_layers(model)
        report.unreached += [explain(path, layers[path]) for path, ours in reached(model).items() if not ours]
        for message in report.unreached:
            warnings.warn(message, PatchWarning, stacklevel=2)
    return report


def revert() -> None:
    """Undo apply(): every holder gets upstream's own object back."""
    patch.revert()


@contextmanager
def patched(
    model: nn.Module | None = None, announce: Callable[[PatchReport], None] | None = None
) -> Iterator[PatchReport]:
    """Within it, gated-delta layers of any imported or later imported model train with deltatune's gradients.

    With `model`, each of its gated-delta layers is traced and reported if it is not reached; `announce` as in apply().
    Nests; the outermost exit reverts.
    """
    global _depth
    report = apply(model, announce)
    _depth += 1
    try:
        yield report
    finally:
        _depth -= 1
        if _depth == 0:
            revert()
