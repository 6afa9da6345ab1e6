"""The trace: all that a step tells the layers of a model, and is no argument of their calls.

Models of other packages call their layers as they like, so the step around a layer cannot pass arguments to the
functions inside it. It sets one frozen `Trace` instead, which `current()` returns and `having()` changes for a while.
docs/how/trace.md has a picture of who changes it and who reads it.

A context variable belongs to a thread: a thread that starts within a step begins with the trace outside all contexts.
MLX runs Python when it traces a function and when it derives a gradient, not when it computes. So a trace must be in
force while mx.value_and_grad or a compiled function is called, and does not matter afterwards. The second run of a
checkpoint happens within that call, but after the contexts around the layer have ended; checkpoint.py and pieces.py
say which of them they bring back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .context import Changed, Context
from .known import Known


class Factors:
    """Arrays that are computed from the trainable weights alone, in the order in which a step asks for them.

    A first trace of the step notes them (`noted`), and computes with zeros in their place (`handed`). They are computed
    once, and are arguments of the traces that follow, which get them by their numbers.
    """

    def __init__(self, computed: Mapping[int, mx.array] | None = None):
        self.noted: list[mx.array] = []
        self.handed: list[mx.array] = []
        self._computed = computed

    def kept(self, *arrays: mx.array) -> list[mx.array]:
        """Note arrays; return those in their place."""
        start = len(self.handed)
        for array in arrays:
            if self._computed is None:
                self.handed.append(mx.zeros(array.shape, array.dtype))
            else:
                self.handed.append(self._computed.get(len(self.noted), array))
            self.noted.append(array)
        return self.handed[start:]


class RouterWatch(NamedTuple):
    """How the routers of a mixture are watched, and whether their sums get gradients.

    `real` [B, T] bool tells which positions of the batch, or of the piece that runs, hold tokens that count.
    """

    real: mx.array
    trained: bool


@dataclass(frozen=True)
class Trace:
    """The settings and notes of a step for the functions inside a layer.

    Attributes:
        whole_rows: Whether rows are trained or scored whole, which a decoder's are not.
        segments: The documents of the packed batch that runs, [B, T] integers; None for rows of one document.
        piece: Where the piece that a layer runs on begins and ends in its row; None for a whole row.
        recomputed: Whether the layer that runs is checkpointed, so that it keeps nothing for its backward pass.
        once: Whether a training step is traced, which nobody maps or differentiates twice.
        shortened: Whether a plan is traced, without most turns of long loops (turns.py).
        inner_layers: The layers, in the trace of a plan, whose peaks other layers of their kinds tell, so that their
            last pieces are enough.
        cheap_twice: Whether a backward pass recomputes the results of cheap operators.
        random_key: The key that the next draw splits, as the one item of a list, so that mx.compile can take it as a
            state; None where MLX's own key serves.
        side_outputs: Where arrays go that a layer computes beside its output; None if nobody collects them.
        routers: How the routers of a mixture are watched; None if they are not.
        read_together: The adapters that read one input, in groups; None where each is computed by itself.
        chosen_experts: Where the experts that a block calls leave the indices of those chosen; None outside a block
            with experts that wait for their scores.
        to_upstream: Whether calls of patched functions go to upstream's own: those of MLX's attention within
            deltatune's, and those of the recurrence within upstream's.
        next_tokens: Whether a compiled step gives all rows of a batch their next token (models/batch_decoder.py), which
            takes as long as its kernels are many.
        factors: The arrays that this step computes from the trainable weights, where these are its arguments; None
            where they are constants in it, and their factors are computed while it is traced.
        known: The facts about arrays (known.py), by the arrays themselves; the outermost `having` begins with none.
    """

    whole_rows: bool = False
    segments: mx.array | None = None
    piece: tuple[int, int] | None = None
    recomputed: bool = False
    once: bool = False
    shortened: bool = False
    inner_layers: Sequence[nn.Module] = ()
    cheap_twice: bool = False
    random_key: list[mx.array] | None = None
    side_outputs: list[mx.array] | None = None
    routers: RouterWatch | None = None
    read_together: Sequence[Sequence[nn.Module]] | None = None
    chosen_experts: list[mx.array] | None = None
    to_upstream: bool = False
    next_tokens: bool = False
    factors: Factors | None = None
    known: Known = field(default_factory=Known)


_context = Context(Trace(), known=Known)
current = _context.current
having = _context.having


def outside() -> Changed[Trace]:
    """Within the context the trace is that outside all contexts, for arrays computed while a step is traced."""
    return having(**vars(Trace()))
