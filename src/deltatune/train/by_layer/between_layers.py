"""Checks that the computation between two layers depends only on the output of the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from ...errors import UserError
from .layer_calls import LayerCalls, Recorder


def check_between(
    calls: LayerCalls,
    forward: Callable[[], Any],
    recorder: Recorder,
    outside: Sequence[mx.array],
    holding: Callable[[Sequence[mx.array]], AbstractContextManager[None]],
) -> None:
    """Check that layers and the computation between them read nothing else that has a gradient.

    Args:
        calls: The calls of the layers.
        forward: Runs the model on a few tokens.
        recorder: The record of that run.
        outside: The trained parameters outside the layers.
        holding: Within its context, the model holds such arrays.

    Raises:
        UserError: They do.
    """
    count, hidden = len(recorder.calls), recorder.entered[0]
    returned = [mx.full(hidden.shape, 0.5, hidden.dtype) for _ in range(count)]
    # The allowed dependency of each array: floats on nothing, hidden states on the output of the layer before.
    may = [None] * len(recorder.floats) + [index - 1 for index in recorder.changed]
    shapes = [*recorder.floats, *(recorder.entered[index] for index in recorder.changed)]
    for at, (allowed, like) in enumerate(zip(may, shapes, strict=True)):

        def one(*differentiated: mx.array, at: int = at) -> list[mx.array]:
            here = Recorder()

            def serve(index: int, *call: Any) -> mx.array:
                here(index, *call)
                here.last = differentiated[index]
                return differentiated[index]

            with holding(differentiated[count:]), calls.served_by(serve):
                forward()
            return [[*here.floats, *(here.entered[index] for index in here.changed)][at]]

        _, gradients = mx.vjp(one, [*returned, *outside], [mx.ones_like(like)])
        if any(bool(mx.any(gradient != 0)) for index, gradient in enumerate(gradients) if index != allowed):
            raise UserError(
                "memory: between its layers, this model reads what earlier layers have computed, or what trains "
                "outside its layers, and a step by layers has no gradient for that; leave memory out."
            )
