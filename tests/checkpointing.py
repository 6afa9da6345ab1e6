"""Runs any function as a checkpointed layer."""

from collections.abc import Callable

import mlx.nn as nn

from deltatune.ops.checkpoint import checkpointed


def checkpoint(function: Callable) -> Callable:
    """Return `function`, which may be a layer, with a gradient that saves its arguments alone and recomputes it."""
    calls = {"__call__": lambda self, *arguments, **keywords: function(*arguments, **keywords)}
    layer = function if isinstance(function, nn.Module) else type("Function", (nn.Module,), calls)()

    def run(*arguments, **keywords):
        with checkpointed([layer]):
            return layer(*arguments, **keywords)

    return run
