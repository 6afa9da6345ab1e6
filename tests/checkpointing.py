"""Runs any function as a checkpointed layer."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from deltatune.ops.checkpoint import checkpointed


class _Layer(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def checkpoint(function: Callable) -> Callable:
    """Return `function`, which may be a layer, with a gradient that saves its arguments alone and recomputes it."""
    layer = function if isinstance(function, nn.Module) else _Layer(function)

    def run(*arguments: Any, **keywords: Any) -> Any:
        with checkpointed([layer]):
            return layer(*arguments, **keywords)

    return run
