"""One launch of a kernel body, described once for Metal, for CUDA and for the tests' host machine.

A body is a function template in one of the .h files here. The kernel that MLX runs is a few lines of text (`source`)
that reserve shared memory and call the body with its compile-time values; the text of the files goes before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any
from zlib import crc32

import mlx.core as mx

from . import cubin

FOLDER = files(__package__)
# The files of bodies, each after those on which it builds.
GATED_DELTA = tuple(
    f"gated_delta/{name}.h"
    for name in ("chunk", "prepare", "strips", "scan_memory", "scan", "reverse", "gradients", "channel")
)
# What each kernel of the gated delta rule needs of them, and what its counterpart on Hopper needs besides `chunk`.
_OF_GATED_DELTA = {
    "prepare": ("chunk", "prepare"),
    "scan": ("chunk", "strips", "scan_memory", "scan"),
    "reverse": ("chunk", "strips", "scan_memory", "reverse"),
    "gradients": ("chunk", "gradients"),
}
_OF_GATED_DELTA_ON_HOPPER = {
    "prepare": ("hopper_cores", "hopper_prepare"),
    "scan": ("hopper_cores", "hopper_scan_copies", "hopper_scans"),
    "reverse": ("hopper_cores", "hopper_scan_copies", "hopper_scans"),
    "wide_scan": ("hopper_cores", "hopper_scan_copies", "hopper_wide_scans"),
    "wide_reverse": ("hopper_cores", "hopper_scan_copies", "hopper_wide_scans"),
    "gradients": (
        "gradients",
        "hopper_cores",
        "hopper_gradient_memory",
        "hopper_gradient_gates",
        "hopper_gradient_weights",
        "hopper_gradients",
    ),
}
ATTENTION = ("attention/attention.h",)
VOCABULARY = ("passes/vocabulary_loss.h",)
WEIGHTED_NORM = ("passes/weighted_norm.h",)
EXPERTS = ("products/experts.h",)
HOPPER_WORDS = ("hopper.h", "hopper_tiles.h")
# In the names of kernels whose groups of warps share out a multiprocessor's registers among them.
HOPPER = "_hopper_"
# The start of the names of LoRA's kernels, whose blocks have so many threads that the compiler must know their number.
LOW_RANK = "low_rank"
# Tells a body where its lane is: the block's position in the grid, the thread in the block, the group, the lane.
PLACE = (
    "const Place at{(int)threadgroup_position_in_grid.x, (int)threadgroup_position_in_grid.y, "
    "(int)threadgroup_position_in_grid.z, (int)thread_index_in_threadgroup, (int)simdgroup_index_in_threadgroup, "
    "(int)thread_index_in_simdgroup};\n"
)

# What a kernel is passed in place of an array that the call does not have.
ABSENT = "Nothing{}"

Arrays = dict[str, mx.array]
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]
Values = dict[str, int | bool | mx.Dtype]
Call = Callable[..., list[mx.array]]


@dataclass(frozen=True)
class Launch:
    """One call of a kernel body.

    Attributes:
        name: The name of the body, a function template.
        memory: The name of the struct template that lays out the body's shared memory.
        inputs: The input arrays by name.
        outputs: The shapes and dtypes of the outputs by name.
        values: The compile-time values by name.
        order: The names of the values that the body takes, in its order.
        memory_order: The names of the values that the struct takes, in its order.
        blocks: The grid, in blocks.
        bytes: The shared memory of a block.
        groups: Groups of 32 lanes per block.
        arguments: The text of the body's arguments; by default the names of the inputs and of the outputs.
        sizes: The text of the sizes that the body takes before its arguments; by default the sequence's length.
        resident: How many blocks of a kernel of Hopper's must fit on a multiprocessor, which bounds a lane's registers.
        calls: What runs it, by machine, once it has run; shared with the launches that `on` returns.
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
    resident: int = 1
    calls: dict[str, Call] = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self) -> str:
        """Return the text between the braces of the kernel, which is the same on every machine."""
        sizes = self.sizes or (next(f"{name}_shape[1]" for name in ("q", "v", "dy") if name in self.inputs),)
        arguments = self.arguments or (*self.inputs, *self.outputs)
        return _source(self.name, self.order, arguments, sizes, self.memory, self.memory_order, self.bytes)

    def on(self, inputs: Arrays) -> Launch:
        """Return this launch with other inputs of the same names, shapes and dtypes, which shares its kernel."""
        other = object.__new__(Launch)
        vars(other).update(vars(self), inputs=inputs)
        return other

    def run(self) -> list[mx.array]:
        """Run the launch on MLX's default device, Metal or CUDA, and return the outputs."""
        call = self.calls.get(_machine())
        if call is None:
            call = self._call()
            # A kernel that is still being built has no outputs yet.
            if not cubin.building():
                self.calls[_machine()] = call
        return call(inputs=list(self.inputs.values()))

    def _call(self) -> Call:
        names = tuple(self.inputs), tuple(self.outputs)
        threads = self.groups * 32 if HOPPER in self.name or self.name.startswith(LOW_RANK) else 0
        kernel = kernel_of(
            _machine(), self.name, *names, self.source, bodies_of(self.name), self.bytes, threads, self.resident
        )
        return call_of(kernel, self.inputs, self.outputs, self.blocks, self.groups, self.values)


# Runs a launch: Launch.run on a GPU, or the host machine in tests.
Execute = Callable[[Launch], list[mx.array]]


def call_of(
    kernel: Any, inputs: Arrays, outputs: Outputs, blocks: tuple[int, int, int], groups: int, values: Values
) -> Call:
    """Return f(inputs=...) -> outputs of `kernel`, made by `kernel_of`, on a grid of `blocks` of `groups` x 32 lanes.

    It takes arrays of the shapes and dtypes of `inputs`.
    """
    x, y, z = blocks
    threads = groups * 32
    shapes, dtypes = zip(*outputs.values(), strict=True)
    given: dict[str, Any] = {
        "output_shapes": list(shapes),
        "output_dtypes": list(dtypes),
        "grid": (x * threads, y, z),
        "threadgroup": (threads, 1, 1),
        "template": list(values.items()),
    }
    if isinstance(kernel, cubin.CubinKernel):
        return kernel.call_of(list(inputs.values()), **given)
    return partial(kernel, **given)


def launched(
    kernel: Any, inputs: Arrays, outputs: Outputs, blocks: tuple[int, int, int], groups: int, values: Values
) -> list[mx.array]:
    """Return the outputs of a kernel for `inputs`. The arguments are those of `call_of`."""
    return call_of(kernel, inputs, outputs, blocks, groups, values)(inputs=list(inputs.values()))


@cache
def numbers(*values: float) -> mx.array:
    """Return `values` as an fp32 array, with zeros up to three elements: the same array at every call."""
    # MLX keeps arrays of up to 8 bytes in memory shared with the host, where every lane's read would cross the bus.
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
    size_arguments = ", ".join(f"(int){text}" for text in sizes)
    return (
        f"static_assert({memory}<{', '.join(memory_order)}>::bytes == {size}, "
        f'"launch and body lay out shared memory in the same way");\n'
        f"DELTATUNE_SHARED(memory, {size});\n{PLACE}"
        f"{name}<{', '.join(order)}>(at, memory, {size_arguments}, {', '.join(arguments)});\n"
    )


def bodies_of(name: str) -> tuple[str, ...]:
    """Return the files that hold the body `name` and what it calls."""
    if name.startswith("expert"):
        return (*HOPPER_WORDS, "products/experts_hopper.h") if HOPPER in name else EXPERTS
    if name.startswith("vocabulary"):
        return VOCABULARY
    if name.startswith(LOW_RANK):
        return ("fragments.h", "products/low_rank.h")
    if name.startswith("weighted_norm"):
        return WEIGHTED_NORM
    if name.startswith("attention"):
        return (*HOPPER_WORDS, *ATTENTION, "attention/hopper.h") if HOPPER in name else ATTENTION
    if "channel" in name:
        return GATED_DELTA
    if HOPPER in name:
        files = ("chunk", *_OF_GATED_DELTA_ON_HOPPER[name.partition(HOPPER)[2]])
        return (*HOPPER_WORDS, *(f"gated_delta/{file}.h" for file in files))
    return tuple(f"gated_delta/{file}.h" for file in _OF_GATED_DELTA[name.removeprefix("gated_delta_")])


@cache
def header(machine: str, bodies: tuple[str, ...] = GATED_DELTA) -> str:
    """Return the text before a kernel of `machine` (metal or cuda): the words that differ, then the bodies."""
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
    resident: int = 1,
) -> Any:
    """Return the kernel of `source`, which calls a body in the files `bodies` and has `size` bytes of shared memory.

    `threads` and `resident` are those of CubinKernel.
    """
    text = header(machine, bodies)
    if machine == "cuda":
        return cubin.CubinKernel(name, inputs, outputs, source, text, size, threads, resident)
    # Within a process MLX finds a kernel that it built by its name, so different texts need different names.
    name = f"{name}_{crc32((text + source).encode()):08x}"
    return mx.fast.metal_kernel(name, list(inputs), list(outputs), source, text)
