"""`expert_updates: active`: an expert without tokens since the last update keeps adapters and moments as they are.

This is lazy AdamW (or whichever optimizer): no decay of weights or moments and no step from old momentum for experts
that were not routed to, while bias correction and schedules go by the global step. It is another algorithm than the
dense update, and costs in proportion to the experts that had tokens. Which had is read off the accumulated gradients:
an expert of a layer is left alone where every gradient of its own in that layer is exactly zero. So nothing has to be
kept beside the state that a run saves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_unflatten

from ..errors import UserError
from ..lora.weights import is_switch
from .bundles import ELEMENTWISE
from .tree import leaves


class ExpertGradients(NamedTuple):
    """What the update of experts needs: their summed gradients by path, which experts have one (layer -> [E] bool), the
    factor that makes a step of them, and whether loss and norm are finite."""

    gradients: dict[str, mx.array]
    touched: dict[str, mx.array]
    factor: mx.array
    healthy: mx.array


class ActiveExperts:
    """The parameters with one leading axis of experts, by layer, and their update outside the compiled step."""

    def __init__(self, model: nn.Module, optimizer: mlx.optimizers.Optimizer):
        if type(optimizer).__name__ not in ELEMENTWISE:
            known = ", ".join(name.lower() for name in ELEMENTWISE)
            raise UserError(
                f"expert_updates: active needs an optimizer that treats every number by itself ({known}); "
                f"{type(optimizer).__name__.lower()} does not. Use one of those, or expert_updates: dense."
            )
        self._model, self._optimizer = model, optimizer
        self._layers = _expert_leaves(model)
        self.paths = {path for paths in self._layers.values() for path in paths}
        if not self.paths:
            raise UserError("expert_updates: active, but no expert layer trains; use expert_updates: dense.")

    def split(self, tree: Any) -> tuple[Any, dict[str, mx.array]]:
        """The tree without expert leaves, and those by path."""
        flat = leaves(tree)
        rest = [(path, leaf) for path, leaf in flat if path not in self.paths]
        return tree_unflatten(rest) if rest else {}, {path: leaf for path, leaf in flat if path in self.paths}

    def touched(self, gradients: dict[str, mx.array]) -> dict[str, mx.array]:
        """Layer -> [E] bool: which experts have a gradient that is not zero."""
        found = {}
        for layer, paths in self._layers.items():
            each = [(gradients[path] != 0).reshape(gradients[path].shape[0], -1).any(axis=1) for path in paths]
            found[layer] = mx.stack(each).any(axis=0)
        return found

    def update(self, experts: ExpertGradients) -> None:
        """Step the touched experts, in place. The optimizer has counted its step."""
        parameters = dict(leaves(self._model.trainable_parameters()))
        for layer, paths in self._layers.items():
            numbers = np.flatnonzero(np.array(experts.touched[layer]))
            if not numbers.size:
                continue
            rows = mx.array(numbers.astype(np.uint32))
            for path in paths:
                self._update_rows(
                    parameters[path], _at(self._optimizer.state, path), experts.gradients[path], rows, experts.factor
                )

    def _update_rows(
        self, parameter: mx.array, moments: dict[str, mx.array], gradient: mx.array, rows: mx.array, factor: mx.array
    ) -> None:
        part = {name: moment[rows] for name, moment in moments.items()}
        scaled = (gradient[rows] * factor).astype(parameter.dtype)
        # Assigned to, so that MLX may write into the buffers that are there.
        parameter[rows] = self._optimizer.apply_single(scaled, parameter[rows], part)
        for name, moment in moments.items():
            moment[rows] = part[name]


def _expert_leaves(model: nn.Module) -> dict[str, list[str]]:
    """Layer (the module that holds gate, up and down) -> paths of its trainable arrays with an axis of experts."""
    trained = {path for path, _ in leaves(model.trainable_parameters())}
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        adapter = "lora_a" in module and module["lora_a"].ndim == 3
        if not adapter and not is_switch(module):
            continue
        names = ("lora_a", "lora_b") if adapter else ("weight", "bias")
        mine = [f"{path}.{name}" for name in names if f"{path}.{name}" in trained]
        if mine:
            found.setdefault(path.rpartition(".")[0], []).extend(mine)
    return found


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree
