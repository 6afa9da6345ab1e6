"""One launch of a kernel body: what Metal, CUDA and the host machine of the tests all need to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from zlib import crc32

import mlx.core as mx

FOLDER = files(__package__)
PLACE = (
    "const Place at{(int)threadgroup_position_in_grid.x, (int)threadgroup_position_in_grid.y, "
    "(int)threadgroup_position_in_grid.z, (int)thread_index_in_threadgroup, (int)simdgroup_index_in_threadgroup, "
    "(int)thread_index_in_simdgroup};\n"
)


@dataclass(frozen=True)
class Launch:
    """A body's name, its arguments in order, compile-time values, and the blocks, groups of 32 lanes, and bytes.

    `order` lists the compile-time values the body takes, `memory` the struct that lays out its shared memory.
    """

    name: str
    memory: str
    inputs: dict[str, mx.array]
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]]
    values: dict[str, int | bool | mx.Dtype]
    order: tuple[str, ...]
    memory_order: tuple[str, ...]
    blocks: tuple[int, int, int]
    bytes: int
    groups: int = field(default=4)

    @property
    def source(self) -> str:
        """The text between the braces of the kernel, the same on every machine."""
        memory = f"{self.memory}<{', '.join(self.memory_order)}>::bytes"
        arguments = ", ".join([*self.inputs, *self.outputs])
        sequence = next(name for name in ("q", "v", "dy") if name in self.inputs)
        return (
            f'static_assert({memory} == {self.bytes}, "launch and body lay out shared memory alike");\n'
            f"DELTATUNE_SHARED(memory, {self.bytes});\n{PLACE}"
            f"{self.name}<{', '.join(self.order)}>(at, memory, (int){sequence}_shape[1], {arguments});\n"
        )

    def run(self) -> list[mx.array]:
        """Launch on the default device: Metal or CUDA."""
        machine = "metal" if mx.metal.is_available() else "cuda"
        kernel = _kernel(machine, self.name, tuple(self.inputs), tuple(self.outputs), self.source, self.bytes)
        x, y, z = self.blocks
        threads = self.groups * 32
        return kernel(
            inputs=list(self.inputs.values()),
            output_shapes=[shape for shape, _ in self.outputs.values()],
            output_dtypes=[dtype for _, dtype in self.outputs.values()],
            grid=(x * threads, y, z),
            threadgroup=(threads, 1, 1),
            template=list(self.values.items()),
        )


@cache
def header(machine: str, channel: bool = True) -> str:
    """The vocabulary of `machine` (metal or cuda) and the bodies; those for gates a channel only where asked."""
    names = [f"{machine}.h", "gated_delta.h"] + ["gated_delta_channel.h"] * channel
    text = "".join((FOLDER / name).read_text() for name in names)
    # MLX hashes the whole source at every launch: what the compiler does not need is left out.
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


@cache
def _kernel(machine: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, size: int):
    name, text = f"{name}_{crc32(source.encode()):08x}", header(machine, "channel" in name)
    if machine == "metal":
        return mx.fast.metal_kernel(name, list(inputs), list(outputs), source, text)
    return mx.fast.cuda_kernel(name, list(inputs), list(outputs), source, text, shared_memory=size)
