"""One launch of a kernel body: what Metal, CUDA and the host machine of the tests all need to know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from zlib import crc32

import mlx.core as mx

from . import cubin

FOLDER = files(__package__)
GATED_DELTA = ("gated_delta.h", "gated_delta_channel.h")
ATTENTION = ("attention.h",)
# Kernels whose groups of warps share out a multiprocessor's registers among them.
HOPPER = "attention_hopper"
PLACE = (
    "const Place at{(int)threadgroup_position_in_grid.x, (int)threadgroup_position_in_grid.y, "
    "(int)threadgroup_position_in_grid.z, (int)thread_index_in_threadgroup, (int)simdgroup_index_in_threadgroup, "
    "(int)thread_index_in_simdgroup};\n"
)


Arrays = dict[str, mx.array]
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]
Values = dict[str, int | bool | mx.Dtype]


@dataclass(frozen=True)
class Launch:
    """A body's name, its inputs and outputs, compile-time values, and the blocks, groups of 32 lanes, and bytes.

    `order` lists the compile-time values the body takes, `memory` the struct that lays out its shared memory;
    `arguments` the text of the body's arguments, where they are not the inputs and the outputs as they stand; `sizes`
    that of the sizes before them, where it is not the sequence's length.
    """

    name: str
    memory: str
    inputs: Arrays
    outputs: Outputs
    values: Values
    order: tuple[str, ...]
    memory_order: tuple[str, ...]
    blocks: tuple[int, int, int]
    bytes: int
    groups: int = 4
    arguments: tuple[str, ...] | None = None
    sizes: tuple[str, ...] | None = None

    @property
    def source(self) -> str:
        """The text between the braces of the kernel, the same on every machine."""
        sizes = self.sizes or (next(f"{name}_shape[1]" for name in ("q", "v", "dy") if name in self.inputs),)
        arguments = self.arguments or (*self.inputs, *self.outputs)
        return _source(self.name, self.order, arguments, sizes, self.memory, self.memory_order, self.bytes)

    def run(self) -> list[mx.array]:
        """Launch on the default device: Metal or CUDA."""
        names = tuple(self.inputs), tuple(self.outputs)
        threads = self.groups * 32 if self.name.startswith(HOPPER) else 0
        kernel = kernel_of(_machine(), self.name, *names, self.source, _bodies(self.name), self.bytes, threads)
        return launched(kernel, self.inputs, self.outputs, self.blocks, self.groups, self.values)


def launched(
    kernel: Any, inputs: Arrays, outputs: Outputs, blocks: tuple[int, int, int], groups: int, values: Values
) -> list[mx.array]:
    """The outputs of `kernel`, one of kernel_of's, on so many blocks of `groups` x 32 lanes."""
    x, y, z = blocks
    threads = groups * 32
    shapes, dtypes = zip(*outputs.values(), strict=True)
    return kernel(
        inputs=list(inputs.values()),
        output_shapes=list(shapes),
        output_dtypes=list(dtypes),
        grid=(x * threads, y, z),
        threadgroup=(threads, 1, 1),
        template=list(values.items()),
    )


@cache
def numbers(*values: float) -> mx.array:
    """fp32 for kernels to read: `values`, zeros up to three; the same array for all that ask."""
    # Up to 8 bytes MLX keeps in memory that the host shares: on CUDA each lane's read would cross the bus.
    return mx.array([*values, *[0.0] * (3 - len(values))], mx.float32)


@cache
def _machine() -> str:
    return "metal" if mx.metal.is_available() else "cuda"


@cache
def _source(
    name: str,
    order: tuple[str, ...],
    arguments: tuple[str, ...],
    sizes: tuple[str, ...],
    memory: str,
    memory_order: tuple[str, ...],
    size: int,
) -> str:
    whole = ", ".join(f"(int){size}" for size in sizes)
    return (
        f"static_assert({memory}<{', '.join(memory_order)}>::bytes == {size}, "
        f'"launch and body lay out shared memory alike");\n'
        f"DELTATUNE_SHARED(memory, {size});\n{PLACE}"
        f"{name}<{', '.join(order)}>(at, memory, {whole}, {', '.join(arguments)});\n"
    )


def _bodies(name: str) -> tuple[str, ...]:
    """The files that the body `name` needs: those for gates a channel only where asked."""
    if name.startswith("expert"):
        return ("expert_product.h",)
    if name.startswith("attention"):
        return ("hopper.h", *ATTENTION, "attention_hopper.h") if name.startswith(HOPPER) else ATTENTION
    return GATED_DELTA if "channel" in name else GATED_DELTA[:1]


@cache
def header(machine: str, bodies: tuple[str, ...] = GATED_DELTA) -> str:
    """The vocabulary of `machine` (metal or cuda), and the bodies."""
    return "".join((FOLDER / name).read_text() for name in (f"{machine}.h", "tiles.h", *bodies))


@cache
def kernel_of(
    machine: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    bodies: tuple[str, ...],
    size: int,
    threads: int = 0,
) -> Any:
    """The kernel of `source`, which calls a body of the files `bodies` and has `size` bytes of shared memory.

    `threads`: as cubin.Kernel has it.
    """
    text = header(machine, bodies)
    if machine == "cuda":
        return cubin.Kernel(name, inputs, outputs, source, text, size, threads)
    # MLX knows within a process what it built by this name.
    name = f"{name}_{crc32((text + source).encode()):08x}"
    return mx.fast.metal_kernel(name, list(inputs), list(outputs), source, text)
