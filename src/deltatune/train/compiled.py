"""Compiles a function that reads arrays of a model; an error in it leaves the model as it was."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..ops.operator.foresight import foreseen
from ..ops.tracing import dispatch
from .tree import leaves

# MLX's message where a function that it compiles reads the values of an array.
_READS = "Attempting to eval an array during function transformations"


@dataclass(eq=False)
class Compiled:
    """A function that is compiled once for each set of shapes, as mx.compile does.

    While MLX compiles, it puts placeholders into `inputs`. If the function raises, MLX leaves them there, and no array
    of the model can be read any more; here they are put back. A model may read values in the middle of its forward
    pass, as mlx-lm's dbrx does to find the rows of each expert: its function runs operation by operation, and a warning
    says so. On an NVIDIA GPU the kernels of the first call are built side by side, and so are those of the trials
    before it.

    `inputs` and `outputs` are trees of arrays that the function reads and changes besides its arguments.
    `before_tracing` is called before each set of shapes is compiled, which may try kernels.
    """

    function: Callable[..., Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any] | None = None
    before_tracing: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        changed = None if self.outputs is None else list(self.outputs)
        self._call = partial(mx.compile, inputs=list(self.inputs), outputs=changed)(self.function)
        self._traced: set[Any] = set()
        # Whether the function reads values, so that MLX cannot compile it.
        self._eager = False

    def __call__(self, *arguments: Any) -> Any:
        # Arguments may be None, too.
        shapes = tuple((path, getattr(x, "shape", None), getattr(x, "dtype", None)) for path, x in leaves(arguments))
        if shapes in self._traced and not self._eager:
            return self._call(*arguments)
        if self.before_tracing is not None:
            self.before_tracing()
        if self._eager:
            return self.function(*arguments)
        before = [pair for tree in self.inputs for pair in _contents(tree)]
        try:
            with nullcontext() if self._traced else foreseen(partial(self._dry_run, arguments, before)):
                results = self._call(*arguments)
        except BaseException as error:
            _put_back(before)
            self._eager = isinstance(error, ValueError) and _READS in str(error)
            if not self._eager:
                raise
            warnings.warn(
                "This model reads values of arrays within its forward pass, so MLX cannot compile it: each operation "
                "of a step runs by itself.",
                RuntimeWarning,
                stacklevel=2,
            )
            return self.function(*arguments)
        self._traced.add(shapes)
        return results

    def _dry_run(self, arguments: tuple[Any, ...], before: Sequence[tuple[Any, Any]]) -> None:
        """Trace a call to learn its kernels, without counting it; then put back the arrays that it replaced."""
        try:
            with dispatch.having(recurrences=Counter(), attentions=Counter(), callers=None):
                self.function(*arguments)
        finally:
            _put_back(before)


def _contents(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        yield tree, dict(tree) if isinstance(tree, dict) else list(tree)
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from _contents(below)


def _put_back(before: Sequence[tuple[Any, Any]]) -> None:
    """Restore the contents of dicts and lists: a function may have put others into their place."""
    for container, held in before:
        if isinstance(container, dict):
            # A module's own update() takes parameters alone.
            dict.clear(container)
            dict.update(container, held)
        else:
            container[:] = held
