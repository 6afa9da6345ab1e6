"""One launch of a kernel body in kernels/passes, with a lane for each piece of work, 128 to a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..kernels.launch import Arrays, Outputs, Program, Values, kernel_of, launched

BODIES = ("passes/pointwise.h", "passes/heads.h", "passes/packed.h", "passes/stored_moments.h")
GROUPS = 4
_LANES = GROUPS * 32
_PLACE = f"const long at = (long)threadgroup_position_in_grid.x * {_LANES} + thread_index_in_threadgroup;\n"


@dataclass(frozen=True)
class Pass:
    """A launch of one kernel body.

    Args:
        name: The name of the body.
        inputs: The input arrays by name.
        outputs: The shapes and dtypes of the output arrays by name.
        arguments: The body's arguments, as they are written in the kernel's text.
        lanes: How many lanes the body needs.
        constants: The body's compile-time constants.
        resident: How many blocks must fit on a multiprocessor, which bounds a lane's registers; 0 for no bound.
    """

    groups: ClassVar[int] = GROUPS
    # The kernel has no compile-time values of its own, since the constants are in its text.
    values: ClassVar[Values] = {}
    changes: ClassVar[tuple[str, ...]] = ()

    name: str
    inputs: Arrays
    outputs: Outputs
    arguments: tuple[str, ...]
    lanes: int
    constants: tuple[int, ...] = ()
    resident: int = 0

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The numbers of blocks along the three axes of the grid."""
        return -(-self.lanes // _LANES), 1, 1

    @property
    def source(self) -> str:
        """The text of the kernel's body, which is the same on every machine."""
        constants = f"<{', '.join(map(str, self.constants))}>" if self.constants else ""
        return f"{_PLACE}{self.name}{constants}(at, {', '.join(self.arguments)});\n"

    def run(self) -> list[mx.array]:
        """Launch the kernel on the CUDA device, and return its outputs."""
        names, threads = (tuple(self.inputs), tuple(self.outputs)), _LANES if self.resident else 0
        program = Program(self.name, *names, self.source, BODIES, threads=threads, resident=self.resident)
        kernel = kernel_of("cuda", program)
        return launched(kernel, self.inputs, self.outputs, self.blocks, self.groups, self.values)


def size_of(name: str, array: mx.array) -> str:
    """Return the text of the number of elements of an input called `name`."""
    return " * ".join(f"(long){name}_shape[{axis}]" for axis in range(array.ndim)) or "1"


def pieces_of(name: str, array: mx.array) -> str:
    """Return the text of the number of pieces of eight elements of an input called `name`."""
    return f"{size_of(name, array)} / 8"


# Runs a launch: Pass.run on a GPU, or the host machine in tests.
Execute = Callable[[Pass], list[mx.array]]
