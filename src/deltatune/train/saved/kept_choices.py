"""Lets a run keep the implementations that it has chosen: in its continuations, and on all its ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ...ops.operator import rankings
from ...ops.operator.rankings import Rankings
from ...options.config import TrainConfig
from ..distributed import World
from . import state


@contextmanager
def keeping(config: TrainConfig) -> Iterator[Rankings]:
    """Within the context, a class of calls keeps its implementation: that of the continued run, if there is one."""
    with rankings.of_run() as chosen:
        saved = state.peek(state.state_path(config.adapter_path)) if config.resume else None
        if saved is not None:
            chosen.continue_with(saved.implementations)
        yield chosen


def agree(chosen: Rankings, world: World) -> None:
    """Give every rank the choices of rank 0. Waits for every rank.

    Ranks meet later classes at different moments, so they cannot agree on times for those: there the order of
    preference decides.
    """
    if world.size == 1:
        return
    text = json.dumps(chosen.names).encode() if world.main else b""
    length = int(world.largest(len(text)))
    numbers = world.gather(mx.array(list(text.ljust(length)), mx.int32))
    main = bytes(numbers[0].tolist())  # type: ignore[arg-type]
    if not world.main:
        chosen.names.clear()
        chosen.continue_with(json.loads(main))
    chosen.by_time = False
