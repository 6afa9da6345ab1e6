"""Finds the custom kernels that a model's training forward reaches, and whether each has a gradient, on any machine.

A new process builds the model anew from its own config. Every custom kernel is replaced there by a stand-in that
computes nothing and records two things: that it was called, and whether the backward pass needed its gradient, which a
custom kernel by itself does not have. The process reports Metal as available, so that it shows what an Apple GPU would
run.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import UserError
from ..machine import environment
from ..ops import operators

# Seconds for the trace.
_LIMIT = 300


@dataclass(frozen=True)
class ReachedKernel:
    """One custom kernel that a training forward calls, and the module and the function that call it.

    It is not `differentiable` where the backward pass reaches the kernel itself, so that training fails there. It is
    where a custom function around it has the gradient, or nothing trains through it.
    """

    name: str
    caller: str
    calls: int
    differentiable: bool

    def __str__(self) -> str:
        how = "has a gradient, or needs none" if self.differentiable else "has NO gradient: cannot be trained through"
        return f"{self.name} ({self.caller}, {self.calls} times): {how}"


def sweep(model: nn.Module) -> list[ReachedKernel]:
    """Trace a training forward of a model of mlx-lm or mlx-vlm, with an image where the model reads images.

    Returns the custom kernels that it calls with deltatune's patches in force, as in training. Nothing is computed; of
    the weights only the dtype matters, by which MLX chooses kernels. UserError if the forward cannot be
    built or traced, with upstream's words, or not within _LIMIT seconds.
    """
    module = type(model).__module__
    arguments = model.config if "config" in vars(model) else getattr(model, "args", None)
    if arguments is None:
        raise UserError(
            f"sweep: {module}.{type(model).__name__} keeps no config from which it could be built anew; expected a "
            "model of mlx-lm or mlx-vlm with the attribute config or args."
        )
    request = pickle.dumps((module, type(model).__name__, arguments, _dtype(model)))
    # deltatune's own kernels are not looked for.
    variables = environment.of_child() | {operator.variable: operator.last for operator in operators.OPERATORS}
    command = [sys.executable, "-m", "deltatune.doctor.custom_kernels_trace"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, env=variables, timeout=_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"sweep: {module}: its training forward was not traced within {_LIMIT} seconds") from error
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(
            f"sweep: {module}: this layer cannot be trained: its training forward cannot be traced: {''.join(last)}"
        )
    return [ReachedKernel(**kernel) for kernel in json.loads(done.stdout.splitlines()[-1])]


def _dtype(model: nn.Module) -> str:
    """The name of the dtype that most of the model's floating-point numbers have."""
    sizes: Counter[str] = Counter()
    parameters: Any = tree_flatten(model.parameters())
    for _, array in parameters:
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).rpartition(".")[2]] += array.size
    return sizes.most_common(1)[0][0] if sizes else "float32"


def without_gradient(kernels: Sequence[ReachedKernel]) -> list[str]:
    """One sentence for each kernel through which training fails, with its name and caller."""
    return [
        f"this layer cannot be trained: {kernel.caller} runs the kernel {kernel.name}, which has no gradient"
        for kernel in kernels
        if not kernel.differentiable
    ]
