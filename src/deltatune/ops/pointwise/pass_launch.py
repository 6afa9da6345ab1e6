"""One launch of a body of kernels/pointwise.h: 128 lanes a block, a lane for each piece of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..kernels.launch import Arrays, Outputs, Values, kernel_of, launched

BODIES = ("pointwise.h",)
GROUPS = 4
_LANES = GROUPS * 32
_PLACE = f"const long at = (long)threadgroup_position_in_grid.x * {_LANES} + thread_index_in_threadgroup;\n"


@dataclass(frozen=True)
class Pass:
    """A body's name, its inputs and outputs, the text of its arguments, how many lanes it needs, and its constants."""

    groups: ClassVar[int] = GROUPS
    # Of the kernel itself, none: constants stand in its text.
    values: ClassVar[Values] = {}

    name: str
    inputs: Arrays
    outputs: Outputs
    arguments: tuple[str, ...]
    lanes: int
    constants: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[int, int, int]:
        return -(-self.lanes // _LANES), 1, 1

    @property
    def source(self) -> str:
        """The text between the braces of the kernel, the same on every machine."""
        constants = f"<{', '.join(map(str, self.constants))}>" if self.constants else ""
        return f"{_PLACE}{self.name}{constants}(at, {', '.join(self.arguments)});\n"

    def run(self) -> list[mx.array]:
        """Launch on the CUDA device."""
        kernel = kernel_of("cuda", self.name, tuple(self.inputs), tuple(self.outputs), self.source, BODIES, 0)
        return launched(kernel, self.inputs, self.outputs, self.blocks, self.groups, self.values)


Execute = Callable[[Pass], list[mx.array]]
