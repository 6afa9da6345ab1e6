"""Which custom kernels a training forward of a model reaches, and whether each has a gradient; on any machine.

The model is built anew from its own config in a process of its own, where every custom kernel is a stand-in that
computes nothing and notes two things: that it was called, and whether backward asked it for a gradient, which no custom
kernel has. Metal is declared present there, so that what an Apple GPU would run is seen without one.
"""

from __future__ import annotations

import json
import os
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
from ..machine.environment import GATED_DELTA

_LIMIT = 300


@dataclass(frozen=True)
class ReachedKernel:
    """One custom kernel: its name, the module and function that call it, how often.

    differentiable: False where backward arrives at the kernel itself, so that training fails there on the machine that
    runs it. True where it does not: a custom function around it has the gradient, or nothing trains through it.
    """

    name: str
    caller: str
    calls: int
    differentiable: bool

    def __str__(self) -> str:
        how = "has a gradient, or needs none" if self.differentiable else "has NO gradient: cannot be trained through"
        return f"{self.name} ({self.caller}, {self.calls} times): {how}"


def sweep(model: nn.Module, *, patches: bool = True) -> list[ReachedKernel]:
    """The custom kernels in a training forward of a model of mlx-lm or mlx-vlm, an image included where it reads one.

    patches: with deltatune's patches in force, as in training; False shows upstream alone. Of the weights only their
    type counts, since kernels are chosen by it, and nothing is computed. UserError where the forward cannot be built
    or traced, with upstream's words.
    """
    module = type(model).__module__
    arguments = model.config if "config" in vars(model) else getattr(model, "args", None)
    if arguments is None:
        raise UserError(f"sweep: {module}.{type(model).__name__} keeps no config to build it anew from.")
    request = pickle.dumps(
        {
            "module": module,
            "class": type(model).__name__,
            "arguments": arguments,
            "patches": patches,
            "dtype": _dtype(model),
        }
    )
    environment = os.environ | {GATED_DELTA: "chunk", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "deltatune.doctor.custom_kernels_trace"]
    done = subprocess.run(command, input=request, capture_output=True, env=environment, timeout=_LIMIT)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(
            f"sweep: {module}: this layer cannot be trained: its training forward cannot be traced: {''.join(last)}"
        )
    return [ReachedKernel(**each) for each in json.loads(done.stdout.splitlines()[-1])]


def _dtype(model: nn.Module) -> str:
    """The name of the type that most of the model's numbers have, quantised ones aside."""
    sizes: Counter[str] = Counter()
    parameters: Any = tree_flatten(model.parameters())
    for _, array in parameters:
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).rpartition(".")[2]] += array.size
    return sizes.most_common(1)[0][0] if sizes else "float32"


def without_gradient(kernels: Sequence[ReachedKernel]) -> list[str]:
    """For each kernel that stops training, a sentence that names it."""
    return [
        f"this layer cannot be trained: {kernel.caller} runs the kernel {kernel.name}, which has no gradient"
        for kernel in kernels
        if not kernel.differentiable
    ]
