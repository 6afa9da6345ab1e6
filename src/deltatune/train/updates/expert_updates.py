"""Implements `expert_updates: active`: the optimizer updates only experts that had tokens since the last update.

This is lazy AdamW, or the lazy form of another optimizer. An expert without tokens keeps its weights and moments: no
decay, and no step from old momentum. Bias correction and schedules follow the global step. The result differs from the
dense update, and the cost is proportional to the number of experts that had tokens. An expert counts as one without
tokens if all its gradients in a layer are exactly zero, so that no further state has to be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_unflatten

from ...errors import UserError
from ...lora.weights import is_switch
from ...machine.numpy_arrays import as_numpy
from ..tree import at, leaves
from .bundles import ELEMENTWISE
from .optimizer import learning_rate_times


class ExpertGradients(NamedTuple):
    """What the update of experts needs.

    Attributes:
        gradients: The summed gradients of expert parameters, by path.
        touched: Which experts have a gradient other than zero: [E] bool, by layer.
        factor: What the gradients are multiplied with before the optimizer's step (1 / weight, and clipping).
        healthy: Whether loss and norm are finite.
    """

    gradients: dict[str, mx.array]
    touched: dict[str, mx.array]
    factor: mx.array
    healthy: mx.array


class ActiveExperts:
    """Finds the parameters whose first axis is the expert, and updates them outside the compiled step.

    Args:
        model: The model.
        optimizer: The optimizer.
        rates: The factor of a parameter's learning rate, by path; 1 where the path is missing.

    Attributes:
        paths: The paths of those parameters.

    Raises:
        UserError: If the optimizer does not treat every number independently, or no expert layer is trainable.
    """

    def __init__(self, model: nn.Module, optimizer: mlx.optimizers.Optimizer, rates: Mapping[str, float] | None = None):
        if type(optimizer).__name__ not in ELEMENTWISE:
            known = ", ".join(name.lower() for name in ELEMENTWISE)
            raise UserError(
                f"expert_updates: active needs an optimizer that treats every number independently ({known}); "
                f"{type(optimizer).__name__.lower()} does not. Use one of those, or expert_updates: dense."
            )
        self._model, self._optimizer, self._rates = model, optimizer, rates or {}
        self._layers = _expert_leaves(model)
        self.paths = {path for paths in self._layers.values() for path in paths}
        if not self.paths:
            raise UserError(
                "expert_updates: active needs a trainable expert layer, and there is none; use expert_updates: dense."
            )

    def split(self, tree: Any) -> tuple[Any, dict[str, mx.array]]:
        """Return the tree without expert parameters, and the expert parameters by path."""
        flat = leaves(tree)
        others = [(path, leaf) for path, leaf in flat if path not in self.paths]
        return tree_unflatten(others) if others else {}, {path: leaf for path, leaf in flat if path in self.paths}

    def touched(self, gradients: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return which experts have a gradient other than zero: [E] bool, by layer."""
        touched = {}
        for layer, paths in self._layers.items():
            nonzero = [(gradients[path] != 0).reshape(gradients[path].shape[0], -1).any(axis=1) for path in paths]
            touched[layer] = mx.stack(nonzero).any(axis=0)
        return touched

    def update(self, experts: ExpertGradients) -> None:
        """Update the touched experts in place. The optimizer must have counted this step already."""
        parameters = dict(leaves(self._model.trainable_parameters()))
        for layer, paths in self._layers.items():
            touched = np.flatnonzero(as_numpy(experts.touched[layer]))
            if not touched.size:
                continue
            rows = mx.array(touched.astype(np.uint32))
            for path in paths:
                moments, gradient = at(self._optimizer.state, path), experts.gradients[path]
                with learning_rate_times(self._optimizer, self._rates.get(path, 1.0)):
                    self._update_rows(parameters[path], moments, gradient, rows, experts.factor)

    def _update_rows(
        self, parameter: mx.array, moments: dict[str, mx.array], gradient: mx.array, rows: mx.array, factor: mx.array
    ) -> None:
        part = {name: moment[rows] for name, moment in moments.items()}
        scaled = (gradient[rows] * factor).astype(parameter.dtype)
        # Assigning to rows lets MLX write into the existing buffer.
        parameter[rows] = self._optimizer.apply_single(scaled, parameter[rows], part)
        for name, moment in moments.items():
            moment[rows] = part[name]


def _expert_leaves(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of trainable expert parameters, by the path of the module that holds gate, up and down."""
    trained = {path for path, _ in leaves(model.trainable_parameters())}
    by_layer: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        is_adapter = "lora_a" in module and module["lora_a"].ndim == 3
        if not is_adapter and not is_switch(module):
            continue
        names = ("lora_a", "lora_b") if is_adapter else ("weight", "bias")
        paths = [f"{path}.{name}" for name in names if f"{path}.{name}" in trained]
        if paths:
            by_layer.setdefault(path.rpartition(".")[0], []).extend(paths)
    return by_layer
