"""Compiles a function that reads arrays of a model, so that an error in it leaves the model as it was."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..ops.operator.foresight import foreseen
from ..ops.tracing import trace
from .tree import leaves

# What MLX says where a function that it compiles reads the values of an array.
_READS = "Attempting to eval an array during function transformations"


def compiled(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    before_tracing: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Compile `function` once for each set of shapes, as mx.compile does.

    While MLX compiles, it puts placeholders into `inputs`. If `function` raises, MLX leaves them there, and no array of
    the model can be read any more; here they are put back. A model may read values in the middle of its forward pass,
    as mlx-lm's dbrx does to find the rows of each expert: its function runs operation by operation, and a warning says
    so. On an NVIDIA GPU the kernels of the first call are built side by side, and so are those of the trials before it.

    Args:
        function: The function.
        inputs: Trees of arrays that it reads besides its arguments.
        outputs: Trees of arrays that it changes.
        before_tracing: Is called before each set of shapes is compiled. Compiling may try kernels.

    Returns:
        The compiled function.
    """
    call = partial(mx.compile, inputs=list(inputs), outputs=None if outputs is None else list(outputs))(function)
    known: set[Any] = set()
    reads = False

    def restoring(*arguments: Any) -> Any:
        nonlocal reads
        # Arguments may be None, too.
        kind = tuple((path, getattr(x, "shape", None), getattr(x, "dtype", None)) for path, x in leaves(arguments))
        if kind in known and not reads:
            return call(*arguments)
        if before_tracing is not None:
            before_tracing()
        if reads:
            return function(*arguments)
        before = [pair for tree in inputs for pair in _contents(tree)]
        try:
            if known:
                results = call(*arguments)
            else:
                with foreseen(partial(_ahead, partial(function, *arguments), before)):
                    results = call(*arguments)
        except BaseException as error:
            _put_back(before)
            reads = isinstance(error, ValueError) and _READS in str(error)
            if not reads:
                raise
            warnings.warn(
                "This model reads values of arrays within its forward pass, so MLX cannot compile it: each operation "
                "of a step runs by itself.",
                RuntimeWarning,
                stacklevel=2,
            )
            return function(*arguments)
        known.add(kind)
        return results

    return restoring


def _ahead(call: Callable[[], Any], before: Sequence[tuple[Any, Any]]) -> None:
    """Trace a call whose results nobody uses, and which is not counted; what it reads stays as it was `before`."""
    try:
        with trace.having(recurrences=Counter(), attentions=Counter(), callers=None):
            call()
    finally:
        _put_back(before)


def _contents(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each dict (as modules are) and list of a tree, with a copy of what it holds."""
    if isinstance(tree, dict | list):
        yield tree, dict(tree) if isinstance(tree, dict) else list(tree)
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from _contents(below)


def _put_back(before: Sequence[tuple[Any, Any]]) -> None:
    """Let dicts and lists hold again what they held: a function may have put others into their place."""
    for container, held in before:
        if isinstance(container, dict):
            # A module's own update() takes parameters alone.
            dict.clear(container)
            dict.update(container, held)
        else:
            container[:] = held
