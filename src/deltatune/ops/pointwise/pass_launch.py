"""Launches of the kernel bodies in kernels/passes that have a lane for each piece of work, and no shared memory."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from ..kernels.launch import LANES, Arrays, Kernel, Launch, Outputs, Plan

BODIES = ("passes/pointwise.h", "passes/heads.h", "passes/packed.h", "passes/stored_moments.h")


def by_lane(
    name: str,
    inputs: Arrays,
    outputs: Outputs,
    arguments: tuple[str, ...],
    lanes: int,
    constants: tuple[int, ...] = (),
    resident: int = 0,
) -> Launch:
    """Return the launch of one kernel body.

    Args:
        name: The name of the body.
        inputs: The input arrays by name.
        outputs: The shapes and dtypes of the output arrays by name.
        arguments: The body's arguments, as they are written in the kernel's text: all, or those before its arrays.
        lanes: How many lanes the body needs.
        constants: The body's compile-time constants.
        resident: How many blocks must fit on a multiprocessor, which bounds a lane's registers; 0 for no bound.
    """
    if not any(name in arguments for name in inputs | outputs):
        arguments = (*arguments, *inputs, *outputs)
    kinds = tuple([(array.shape, array.dtype) for array in inputs.values()])
    plan = _plan(name, kinds, tuple(outputs.items()), arguments, lanes, constants)
    return _kernel(name, resident).launch(inputs, plan)


@lru_cache(maxsize=1024)
def _plan(
    name: str,
    kinds: tuple[Any, ...],
    outputs: tuple[tuple[str, Any], ...],
    arguments: tuple[str, ...],
    lanes: int,
    constants: tuple[int, ...],
) -> Plan:
    values = f"<{', '.join(map(str, constants))}>" if constants else ""
    text = f"{values}(at, {', '.join(arguments)})"
    return Plan(outputs=dict(outputs), blocks=(-(-lanes // LANES), 1, 1), groups=LANES // 32, text=text)


@cache
def _kernel(name: str, resident: int) -> Kernel:
    return Kernel(name=name, files=BODIES, bounded=resident > 0, resident=resident)


def size_of(name: str, array: mx.array) -> str:
    """Return the text of the number of elements of an input called `name`."""
    return " * ".join(f"(long){name}_shape[{axis}]" for axis in range(array.ndim)) or "1"


def pieces_of(name: str, array: mx.array) -> str:
    """Return the text of the number of pieces of eight elements of an input called `name`."""
    return f"{size_of(name, array)} / 8"
