"""Builds graphs as an Apple or NVIDIA GPU would build them, on a machine without one, so that they can be planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx


def opaque(inputs: Sequence[mx.array], outputs: Sequence[tuple[Sequence[int], mx.Dtype]]) -> list[mx.array]:
    """Arrays of these shapes and dtypes that hold `inputs` until they are computed, as the outputs of a kernel do."""
    start = mx.depends([mx.zeros(1)], list(inputs))[0]
    made = [mx.full(tuple(shape), start.astype(dtype), dtype) for shape, dtype in outputs]
    return list(mx.depends(made, list(inputs)))


class _Kernel:
    """Stands for a compiled kernel."""

    def __call__(self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        return opaque(inputs, list(zip(output_shapes, output_dtypes, strict=True)))


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    """mx.fast.rms_norm as a GPU's primitive; its gradient also writes a [tokens, width] array for the weight's."""
    weights = [] if weight is None else [weight]

    def backward(primals: Any, cotangent: mx.array, _output: mx.array) -> Any:
        if not isinstance(primals, (list, tuple)):
            (dx,) = opaque([primals, cotangent], [(x.shape, x.dtype)])
            return dx
        dx, partial = opaque([*primals, cotangent], [(x.shape, x.dtype), (x.shape, x.dtype)])
        return [dx, mx.depends([partial.reshape(-1, x.shape[-1])], [dx])[0].sum(axis=0)]

    function: Any = mx.custom_function(lambda *given: opaque(given, [(x.shape, x.dtype)])[0])
    function.vjp(backward)
    return function(x, *weights)


def _rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
    function: Any = mx.custom_function(lambda x: opaque([x], [(x.shape, x.dtype)])[0])
    function.vjp(lambda primal, cotangent, _output: opaque([cotangent], [(x.shape, x.dtype)])[0])
    return function(x)


@contextmanager
def pretended(device: str) -> Iterator[None]:
    """Within the context, deltatune builds the graphs of `device`: "cpu", "metal" or "cuda". They cannot be evaluated.

    Kernels, and MLX's own norm and rotary embedding, become arrays of the same shapes; all trials count as passed.
    """
    if device == "cpu":
        yield
        return
    from deltatune.machine import backend, nvidia
    from deltatune.ops.kernels import launch
    from deltatune.ops.operator import candidates, kernel_operator, verdicts
    from deltatune.patches import evidence

    passed: Callable[..., Any] = lambda *_: verdicts.Verdict("", "", 1.0, {"y": 0.0})  # noqa: E731
    with ExitStack() as stack:
        for module, name, value in (
            (backend, "device", lambda: device),
            (backend, "compares_times", lambda: False),
            (nvidia, "generation", lambda: nvidia.HOPPER),
            (kernel_operator, "is_right", lambda *_, **__: True),
            (candidates, "verdict_on", passed),
            (launch, "kernel_of", lambda *_: _Kernel()),
            (evidence, "_outcome", lambda *_: None),
            (mx.fast, "rms_norm", _rms_norm),
            (mx.fast, "rope", _rope),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield
