"""The rule by which mx.vmap maps the custom functions in this folder, and the refusal of second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx


def operator_name(erases: bool) -> str:
    """Return the operator's name in Python: linear attention is the gated delta rule that erases nothing."""
    return "gated_delta" if erases else "linear_attention"


def no_second_derivative(erases: bool) -> str:
    """Return the message that refuses a second derivative."""
    name = operator_name(erases)
    return (
        f"{name} has no second derivative: its backward pass is written by hand. "
        f"Force the recurrence, DELTATUNE_{name.upper()}=naive, where one is needed."
    )


def over_batch(
    function: Callable[..., Sequence[mx.array]], batch_in: Sequence[int], batch_out: Sequence[int]
) -> Callable[..., tuple[list[mx.array], list[int]]]:
    """Return a rule for mx.custom_function.vmap, which folds the mapped axis into the batch axis of `function`.

    `batch_in` and `batch_out` are the positions of the batch axis in each array that it takes and returns.
    """

    def rule(inputs: Sequence[mx.array], axes: Sequence[int | None]) -> tuple[list[mx.array], list[int]]:
        mapped = next(x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None)
        folded = [_fold(x, axis, at, mapped) for x, axis, at in zip(inputs, axes, batch_in, strict=True)]
        outputs = function(*folded)
        unfolded = [mx.unflatten(x, at, (mapped, -1)) for x, at in zip(outputs, batch_out, strict=True)]
        return unfolded, list(batch_out)

    return rule


def _fold(x: mx.array, axis: int | None, batch: int, mapped: int) -> mx.array:
    """Merge the mapped axis into the batch axis. An array that is not mapped is repeated `mapped` times."""
    if axis is None:
        shape = (*x.shape[:batch], mapped, *x.shape[batch:])
        x = mx.broadcast_to(mx.expand_dims(x, batch), shape)
    else:
        x = mx.moveaxis(x, axis, batch)
    return mx.flatten(x, batch, batch + 1)
