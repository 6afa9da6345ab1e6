"""The declaration of a kernel, and one launch of it: for Metal, for CUDA and for the tests' host machine.

A body is a function template in one of the .h files here, and a `Kernel` declares it. MLX's kernel is a few lines of
text (`Launch.source`) that reserve shared memory and call the body with its compile-time values; the text of the files
goes before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from zlib import crc32

import mlx.core as mx

from ..tracing import dispatch
from . import cubin
from .memory import FOLDER, bytes_of, without_comments

# Hopper's own instructions, which the bodies of its kernels build on.
HOPPER_WORDS = ("hopper.h", "hopper_tiles.h")
# Tells a body where its lane is: the block's position in the grid, the thread in the block, the group, the lane.
PLACE = (
    "const Place at{(int)threadgroup_position_in_grid.x, (int)threadgroup_position_in_grid.y, "
    "(int)threadgroup_position_in_grid.z, (int)thread_index_in_threadgroup, (int)simdgroup_index_in_threadgroup, "
    "(int)thread_index_in_simdgroup};\n"
)

# Lanes in a block of a kernel without shared memory, and the number of a lane among all.
LANES = 128
PLACE_OF_LANE = f"const long at = (long)threadgroup_position_in_grid.x * {LANES} + thread_index_in_threadgroup;\n"

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
    """The declaration of a kernel, which is called with its inputs and a plan.

    Attributes:
        name: The name of the kernel in a profile.
        body: The name of the body, a function template; by default that of the kernel.
        files: The files with the body and the functions that it calls, each after those on which it builds.
        values: The names of the compile-time values that the body takes, in its order.
        template: The text of the body's template argument, if it takes one type with all values in place of them.
        sizes: The text of the sizes that the body takes before its arrays, where it is the same at every launch.
        inputs: The names of the inputs in the order of the kernel's parameters, of which a call may lack some; without
            them, all inputs of a call are taken as they come.
        arrays: The names of the inputs and outputs that the body takes, in its order; a call may lack some of them.
        memory: The name of the struct template that lays out the shared memory of a block. Without one, the body takes
            the number of its lane in place of a Place and the memory.
        memory_values: The names of the values that the struct takes, in its order, or the text of a value; by default
            the body's template argument.
        bounded: Whether the compiler is told the threads of a block: where groups share out a multiprocessor's
            registers among them, or a block has many threads. Else it gives a thread the registers that it asks for.
        resident: How many blocks of a bounded kernel must fit on a multiprocessor, which bounds a lane's registers.
        in_order: Whether blocks wait for others that are before them in the grid, as GPUs of NVIDIA start them.
    """

    name: str
    files: tuple[str, ...]
    values: tuple[str, ...] = ()
    template: str = ""
    body: str = ""
    sizes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    memory: str = ""
    memory_values: tuple[str, ...] = ()
    bounded: bool = False
    resident: int = 1
    in_order: bool = False

    def __call__(self, inputs: Arrays, plan: Plan) -> list[mx.array]:
        """Launch the kernel on these inputs, by name, and return its outputs."""
        return self.launch(inputs, plan)()

    def launch(self, inputs: Arrays, plan: Plan) -> Launch:
        """Return the launch of such a call."""
        known = plan.launches.get(self)
        if known is None:
            names = (*self.values, *(name for name in self.memory_values if name in plan.values))
            values = {name: plan.values[name] for name in names}
            size = self.bytes(values, plan.machine)
            known = plan.launches[self] = vars(plan) | {"kernel": self, "values": values, "bytes": size, "calls": {}}
        if self.inputs:
            inputs = {name: inputs[name] for name in self.inputs if name in inputs}
        launch = object.__new__(Launch)
        vars(launch).update(known, inputs=inputs)
        return launch

    @property
    def layout(self) -> tuple[str, ...]:
        """The text of the arguments of the struct that lays out the shared memory."""
        return self.memory_values or (self.template,)

    def bytes(self, values: Values, machine: str) -> int:
        """Return the shared memory of a block with these values, as the header lays it out."""
        return bytes_of(self.memory, self.layout, self.files, tuple(values.items()), machine) if self.memory else 0


# These two are made at every call where no plan is kept, and a frozen dataclass takes three times as long to make.
@dataclass(kw_only=True, eq=False)
class Plan:
    """How calls are launched that have the same inputs by name, of the same shapes and dtypes; it may be kept for them.

    Attributes:
        outputs: The shapes and dtypes of the outputs by name.
        blocks: The grid, in blocks.
        values: The compile-time values by name; a kernel takes those that it declares.
        groups: Groups of 32 lanes per block.
        sizes: The text of the sizes that the body takes before its arrays; by default that of the declaration.
        written: The text of those arguments that are not written as an array's name, or as ABSENT.
        text: The text of the template values and of all arguments of a body without shared memory.
        changes: The names of inputs that the kernel writes into; nobody else may hold these arrays.
        machine: The machine of the layout of shared memory, where that depends on it: `metal` or `cuda`.
        launches: The launches of kernels by this plan without their inputs, once they have run.
    """

    outputs: Outputs
    blocks: Blocks
    values: Values = field(default_factory=dict)
    groups: int = 4
    sizes: tuple[str, ...] = ()
    written: dict[str, str] = field(default_factory=dict)
    text: str = ""
    changes: tuple[str, ...] = ()
    machine: str = ""
    launches: dict[Kernel, dict[str, Any]] = field(default_factory=dict, repr=False)


@dataclass(kw_only=True, eq=False)
class Launch(Plan):
    """One call of a kernel, as a device runs it: with its inputs by name, and the `bytes` of a block's shared memory.

    `calls` is the compiled call, by machine, once it has run; the launches of a plan share it.
    """

    kernel: Kernel
    inputs: Arrays
    bytes: int
    calls: dict[str, Call] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def source(self) -> str:
        """The text between the braces of the kernel, which is the same on every machine."""
        if not self.kernel.memory:
            return f"{PLACE_OF_LANE}{self.name}{self.text};\n"
        present = {name: name for name in (*self.inputs, *self.outputs)} | self.written
        arguments = tuple(present.get(name, ABSENT) for name in self.kernel.arrays)
        return _source(self.kernel, self.sizes or self.kernel.sizes, arguments, self.bytes)

    def __call__(self) -> list[mx.array]:
        """Run the launch on the device in force (`on`), MLX's default device if none is, and return the outputs."""
        return (dispatch.current().device or Launch.run)(self)

    def run(self) -> list[mx.array]:
        """Run the launch on MLX's default device, Metal or CUDA, and return the outputs."""
        call = self.calls.get(_machine())
        if call is None:
            call = self._call(_machine())
            # A kernel that is still being built has no outputs yet.
            if not cubin.building():
                self.calls[_machine()] = call
        return call(inputs=list(self.inputs.values()))

    def _call(self, machine: str) -> Call:
        """Return f(inputs=...) -> outputs of the compiled kernel, for arrays of the shapes and dtypes of the inputs."""
        threads = self.groups * 32
        names = (tuple(self.inputs), tuple(self.outputs))
        bounds = threads if self.kernel.bounded else 0
        kernel = kernel_of(machine, self.kernel, *names, self.source, self.bytes, bounds)
        x, y, z = self.blocks
        shapes, dtypes = zip(*self.outputs.values(), strict=True)
        options: dict[str, Any] = {
            "output_shapes": list(shapes),
            "output_dtypes": list(dtypes),
            "grid": (x * threads, y, z),
            "threadgroup": (threads, 1, 1),
            "template": list(self.values.items()),
        }
        if isinstance(kernel, cubin.CubinKernel):
            return kernel.call_of(list(self.inputs.values()), **options)
        return partial(kernel, **options)


# Runs a launch: Launch.run on a GPU, or the host machine in tests.
Device = Callable[[Launch], list[mx.array]]


def on(device: Device | None) -> AbstractContextManager[None]:
    """Within the context, this device runs all launches, whatever their sizes, and no operator is tried before.

    A trial and the tests' host machine use it; without it, launches run on MLX's default device.
    """
    return dispatch.having(device=device)


def forced() -> bool:
    """Whether a device was chosen, so that kernels serve wherever they can."""
    return dispatch.current().device is not None


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
    template = kernel.template or ", ".join(kernel.values)
    return (
        f"static_assert({kernel.memory}<{', '.join(kernel.layout)}>::bytes == {size}, "
        f'"launch and body lay out shared memory in the same way");\n'
        f"DELTATUNE_SHARED(memory, {size});\n{PLACE}"
        f"{kernel.body or kernel.name}<{template}>(at, memory, {size_arguments}, {', '.join(arguments)});\n"
    )


@cache
def header(machine: str, bodies: tuple[str, ...]) -> str:
    """Return the text before a kernel of `machine` (metal or cuda): the words that differ, then the files `bodies`."""
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in (f"{machine}.h", "tiles.h", *bodies))


@cache
def kernel_of(
    machine: str,
    kernel: Kernel,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    size: int,
    threads: int,
) -> Any:
    """Return the kernel of a text on `machine` (metal or cuda), to be called as MLX's own kernels are."""
    name = kernel.name
    text = header(machine, kernel.files)
    if machine == "cuda":
        return cubin.CubinKernel(name, inputs, outputs, source, text, size, threads, kernel.resident)
    # Within a process MLX finds a kernel that it built by its name, so different texts need different names.
    unique = f"{name}_{crc32((text + source).encode()):08x}"
    return mx.fast.metal_kernel(unique, list(inputs), list(outputs), source, stripped(text))


def stripped(text: str) -> str:
    """Return a kernel's text without comments and indentation: MLX joins and compares all of it at each launch."""
    return re.sub(r"\s*\n\s*", "\n", without_comments(text))
