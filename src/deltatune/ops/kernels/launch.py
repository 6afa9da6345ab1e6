"""The declaration of a kernel, and one launch of it: for Metal, for CUDA and for the tests' host machine.

A body is a function template in one of the .h files here, and a `Kernel` declares it. MLX's kernel is a few lines of
text (`Launch.source`) that reserve shared memory and call the body with its compile-time values; the text of the files
goes before them.
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
# Hopper's own instructions, which the bodies of its kernels build on.
HOPPER_WORDS = ("hopper.h", "hopper_tiles.h")
# Tells a body where its lane is: the block's position in the grid, the thread in the block, the group, the lane.
PLACE = (
    "const Place at{(int)threadgroup_position_in_grid.x, (int)threadgroup_position_in_grid.y, "
    "(int)threadgroup_position_in_grid.z, (int)thread_index_in_threadgroup, (int)simdgroup_index_in_threadgroup, "
    "(int)thread_index_in_simdgroup};\n"
)

#: The multiplications of a launch on an Apple GPU: about a second of an M1's, if it does half of its 1.3e12 a second.
#: macOS ends work that keeps a GPU for about five seconds, so that longer launches are divided.
MOST_MULTIPLICATIONS = 6.5e11
# The argument in place of an array that the call does not have.
ABSENT = "Nothing{}"

Arrays = dict[str, mx.array]
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]
Values = dict[str, int | bool | mx.Dtype]
Blocks = tuple[int, int, int]
Call = Callable[..., list[mx.array]]


# Kernels are compared by identity (eq=False): each is declared once.
@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """The declaration of a kernel, which all its launches share.

    Attributes:
        name: The name of the body, a function template, and of the kernel in a profile.
        files: The files with the body and the functions that it calls, each after those on which it builds.
        values: The names of the compile-time values that the body takes, in its order.
        sizes: The text of the sizes that the body takes before its arrays, where it is the same at every launch.
        arrays: The names of the inputs and outputs that the body takes, in its order; a call may lack some of them.
        memory: The name of the struct template that lays out the shared memory of a block.
        memory_values: The names of the values that the struct takes, in its order, or the text of a value.
        bounded: Whether the compiler is told the threads of a block: where groups share out a multiprocessor's
            registers among them, or a block has many threads. Else it gives a thread the registers that it asks for.
        resident: How many blocks of a bounded kernel must fit on a multiprocessor, which bounds a lane's registers.
    """

    name: str
    files: tuple[str, ...]
    values: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    arrays: tuple[str, ...]
    memory: str
    memory_values: tuple[str, ...]
    bounded: bool = False
    resident: int = 1


@dataclass(frozen=True)
class Program:
    """The input of the compiler for a launch: the same for all launches that share compiled code.

    Attributes:
        name: The kernel's name.
        inputs, outputs: The names of its arrays.
        source: The text between the kernel's braces, which is the same on every machine.
        files: The files with the text before it.
        bytes: The shared memory of a block.
        threads: The threads of a block if the compiler is told, else 0.
        resident: With `threads`, how many blocks must fit on a multiprocessor.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    files: tuple[str, ...]
    bytes: int = 0
    threads: int = 0
    resident: int = 1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One call of a kernel.

    Attributes:
        kernel: The kernel.
        inputs: The input arrays by name.
        outputs: The shapes and dtypes of the outputs by name.
        values: The compile-time values by name.
        blocks: The grid, in blocks.
        bytes: The shared memory of a block.
        groups: Groups of 32 lanes per block.
        sizes: The text of the sizes that the body takes before its arrays; by default that of the declaration.
        written: The text of those arguments that are not written as an array's name, or as ABSENT.
        changes: The names of inputs that the kernel writes into; nobody else may hold these arrays.
        calls: The compiled call, by machine, once it has run; shared with the launches that `on` returns.
    """

    kernel: Kernel
    inputs: Arrays
    outputs: Outputs
    values: Values
    blocks: Blocks
    bytes: int
    groups: int = 4
    sizes: tuple[str, ...] = ()
    written: dict[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    calls: dict[str, Call] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def source(self) -> str:
        """The text between the braces of the kernel, which is the same on every machine."""
        present = {name: name for name in (*self.inputs, *self.outputs)} | self.written
        arguments = tuple(present.get(name, ABSENT) for name in self.kernel.arrays)
        return _source(self.kernel, self.sizes or self.kernel.sizes, arguments, self.bytes)

    @property
    def program(self) -> Program:
        kernel, names = self.kernel, (tuple(self.inputs), tuple(self.outputs))
        threads = self.groups * 32 if kernel.bounded else 0
        return Program(kernel.name, *names, self.source, kernel.files, self.bytes, threads, kernel.resident)

    def on(self, inputs: Arrays) -> Launch:
        """Return this launch with other inputs of the same names, shapes and dtypes, which shares its kernel."""
        other = object.__new__(Launch)
        vars(other).update(vars(self), inputs=inputs)
        return other

    def run(self) -> list[mx.array]:
        """Run the launch on MLX's default device, Metal or CUDA, and return the outputs."""
        call = self.calls.get(_machine())
        if call is None:
            kernel = kernel_of(_machine(), self.program)
            call = call_of(kernel, self.inputs, self.outputs, self.blocks, self.groups, self.values)
            # A kernel that is still being built has no outputs yet.
            if not cubin.building():
                self.calls[_machine()] = call
        return call(inputs=list(self.inputs.values()))


# Runs a launch: Launch.run on a GPU, or the host machine in tests.
Execute = Callable[[Launch], list[mx.array]]


def call_of(kernel: Any, inputs: Arrays, outputs: Outputs, blocks: Blocks, groups: int, values: Values) -> Call:
    """Return f(inputs=...) -> outputs of `kernel`, made by `kernel_of`, on a grid of `blocks` of `groups` x 32 lanes.

    It takes arrays of the shapes and dtypes of `inputs`.
    """
    x, y, z = blocks
    threads = groups * 32
    shapes, dtypes = zip(*outputs.values(), strict=True)
    options: dict[str, Any] = {
        "output_shapes": list(shapes),
        "output_dtypes": list(dtypes),
        "grid": (x * threads, y, z),
        "threadgroup": (threads, 1, 1),
        "template": list(values.items()),
    }
    if isinstance(kernel, cubin.CubinKernel):
        return kernel.call_of(list(inputs.values()), **options)
    return partial(kernel, **options)


def launched(
    kernel: Any, inputs: Arrays, outputs: Outputs, blocks: Blocks, groups: int, values: Values
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
def _source(kernel: Kernel, sizes: tuple[str, ...], arguments: tuple[str, ...], size: int) -> str:
    size_arguments = ", ".join(f"(int){text}" for text in sizes)
    return (
        f"static_assert({kernel.memory}<{', '.join(kernel.memory_values)}>::bytes == {size}, "
        f'"launch and body lay out shared memory in the same way");\n'
        f"DELTATUNE_SHARED(memory, {size});\n{PLACE}"
        f"{kernel.name}<{', '.join(kernel.values)}>(at, memory, {size_arguments}, {', '.join(arguments)});\n"
    )


@cache
def header(machine: str, bodies: tuple[str, ...]) -> str:
    """Return the text before a kernel of `machine` (metal or cuda): the words that differ, then the files `bodies`."""
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in (f"{machine}.h", "tiles.h", *bodies))


@cache
def kernel_of(machine: str, program: Program) -> Any:
    """Return the compiled kernel of a program on `machine` (metal or cuda); `call_of` makes a call of it."""
    text = header(machine, program.files)
    if machine == "cuda":
        names, bounds = (program.inputs, program.outputs), (program.threads, program.resident)
        return cubin.CubinKernel(program.name, *names, program.source, text, program.bytes, *bounds)
    # Within a process MLX finds a kernel that it built by its name, so different texts need different names.
    name = f"{program.name}_{crc32((text + program.source).encode()):08x}"
    return mx.fast.metal_kernel(name, list(program.inputs), list(program.outputs), program.source, text)
