"""Finds modules with arrays that their owner reads directly, by lazy forward passes with stand-ins for them.

An adapter changes the output of a call of a module. An owner that multiplies by `self.proj.weight` itself does not call
the module and so would bypass the adapter; such a module must not get one. Watching is cheap: MLX is lazy, so a forward
pass without an evaluation only builds a graph, for a model of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..layers import without_pictures
from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from

_ARRAY_NAMES = ("weight", "scales", "biases", "bias")


def directly_read(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the name of an array that other code than its module's methods reads in a forward pass, by the module's
    path.

    The passes are one in training mode over two tokens, and two in inference mode over two tokens and one, since models
    branch on both. The stand-ins are of another class than the candidates, as adapters are: an owner that reads the
    arrays of nn.Linear alone (after a test of the class) would call an adapter. Afterwards the model, its layers'
    caches and the random state are as before.
    """
    read: dict[str, list[str]] = {path: [] for path in candidates}
    stand_ins = [(path, _StandIn(module, read[path])) for path, module in candidates.items()]
    with drawing_from(mx.random.key(0)), undisturbed(model):
        model.update_modules(tree_unflatten(stand_ins))
        try:
            for training, length in ((True, 2), (False, 2), (False, 1)):
                model.train(training)
                model(mx.zeros((1, length), dtype=mx.int32), **without_pictures(model))
        finally:
            # Of a list of modules, undisturbed() keeps the list itself.
            model.update_modules(tree_unflatten(list(candidates.items())))
    return {path: names[0] for path, names in read.items() if names}


class _StandIn(nn.Module):
    """Passes calls on to a module, as an adapter would, and adds the names of the module's arrays that are read."""

    def __init__(self, module: nn.Module, read: list[str]) -> None:
        super().__init__()
        # object.__setattr__ keeps nn.Module from registering the module as a child.
        object.__setattr__(self, "_module_and_read", (module, read))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module_and_read[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module, read = self._module_and_read
        if name in _ARRAY_NAMES and name in module:
            read.append(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARRAY_NAMES:
            setattr(self._module_and_read[0], name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self._module_and_read[0] else default
