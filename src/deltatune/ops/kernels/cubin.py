"""Kernels for NVIDIA GPUs that are compiled once per machine and kept in the cache folder, packed.

mx.fast.cuda_kernel would compile each kernel anew in every process, which takes 1.6 s per kernel.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...machine import atomic_files, environment, nvidia
from ..tracing import dispatch
from . import builds, fatbin, nvrtc

logger = logging.getLogger(__name__)

_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.uint8: "unsigned char",
    mx.bool_: "bool",
}
_PROLOGUE = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
_DIGEST = hashlib.sha256().digest_size
Constants = Sequence[tuple[str, int | bool | mx.Dtype]]


@contextmanager
def built_side_by_side(builders: ThreadPoolExecutor | None = None) -> Iterator[None]:
    """Within the context kernels are built, each in a thread of its own, and not launched: their outputs are zeros.

    Afterwards the same calls find their kernels built. A kernel that does not compile raises its error then. `builders`
    may go on building after the context has ended; without them it ends when all kernels are built.
    """
    if dispatch.current().builders is not None:
        yield
        return
    with nullcontext(builders) if builders else ThreadPoolExecutor() as pool, dispatch.having(builders=pool):
        yield


@contextmanager
def launching() -> Iterator[None]:
    """Within the context kernels are launched, as a trial's are, even while those around it are only built."""
    with dispatch.having(builders=None):
        yield


def building() -> bool:
    """Whether kernels are only built (built_side_by_side)."""
    return dispatch.current().builders is not None


# Kernels are compared by identity (eq=False): launch.py makes one for each text.
@dataclass(frozen=True, eq=False)
class CubinKernel:
    """A kernel for NVIDIA GPUs, called with the arguments of a kernel of mx.fast.cuda_kernel.

    Attributes:
        name: The kernel's name.
        inputs: The names of its inputs.
        outputs: The names of its outputs.
        source: The text between the kernel's braces, which may read the shape of input NAME as NAME_shape.
        header: The text before the kernel.
        shared_memory: Bytes of shared memory per block.
        threads: Threads per block, for a kernel with groups that share out registers among them or with many threads;
            else 0, and the compiler gives a thread all the registers that it needs.
        resident: With `threads`, how many blocks must fit on a multiprocessor, which bounds a thread's registers.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str
    shared_memory: int
    threads: int = 0
    resident: int = 1

    def __call__(self, *, inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
        return self.call_of(inputs, **launch)(inputs=inputs)

    def call_of(
        self,
        inputs: Sequence[mx.array],
        *,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Constants,
    ) -> Callable[..., list[mx.array]]:
        """Return the kernel as a function of `inputs=` alone, for arrays of the shapes and dtypes of these."""
        shapes = [array.shape if read else () for array, read in zip(inputs, _shapes_read(self), strict=True)]
        dtypes = tuple(array.dtype for array in inputs)
        axes = tuple(map(len, shapes))
        kind = (tuple(template), dtypes, axes, tuple(output_dtypes))
        builders = dispatch.current().builders
        if builders is not None:
            builds.begin(builders, (self, *kind), partial(_build, self, *kind))
            outputs = list(zip(output_shapes, output_dtypes, strict=True))
            return lambda inputs: [mx.zeros(*output) for output in outputs]
        arguments: dict[str, Any] = {
            "name": self.name,
            "compiled_source": builds.code((self, *kind), partial(_build, self, *kind)),
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "scalars": [size for shape in shapes for size in shape],
            "grid": grid,
            "threadgroup": threadgroup,
            "shared_memory": self.shared_memory,
            "ensure_row_contiguous": True,
        }
        return lambda inputs: mx.fast.precompiled_cuda_kernel(inputs=inputs, **arguments)

    def text(
        self, constants: Constants, dtypes: Sequence[mx.Dtype], axes: Sequence[int], results: Sequence[mx.Dtype]
    ) -> str:
        """Return the kernel's text; `axes` counts those of an input's shape, 0 where `source` does not read it."""
        sizes = [
            (name, [f"{name}_{axis}" for axis in range(count)]) for name, count in zip(self.inputs, axes, strict=True)
        ]
        parameters = [f"const {_TYPES[dtype]}* {name}" for name, dtype in zip(self.inputs, dtypes, strict=True)]
        parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in zip(self.outputs, results, strict=True)]
        parameters += [f"const int {size}" for _, names in sizes for size in names]
        lines = [_constant(*constant) for constant in constants]
        lines += [f"const int {name}_shape[] = {{{', '.join(names)}}};\n" for name, names in sizes if names]
        bounds = f"__launch_bounds__({self.threads}, {self.resident}) " if self.threads else ""
        start = f'extern "C" __global__ void {bounds}{self.name}({", ".join(parameters)}) {{\n'
        return "".join([_PROLOGUE, self.header, start, *lines, self.source, "}\n"])


def _constant(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_TYPES[value]};\n"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};\n"


@cache
def _shapes_read(kernel: CubinKernel) -> tuple[bool, ...]:
    return tuple(f"{name}_shape" in kernel.source for name in kernel.inputs)


def _build(kernel: CubinKernel, *kind: tuple) -> bytes:
    return code_of(kernel.name, kernel.text(*kind))


def code_of(name: str, text: str) -> bytes:
    """Return the code of a kernel's text for MLX's device, from the cache folder or else compiled and stored there."""
    key = hashlib.sha256(f"{architecture()} {nvrtc.version()} {fatbin.mode()} {text}".encode()).hexdigest()
    path = environment.cache_directory() / "cubins" / f"{key[:32]}.cubin"
    code = _read(path)
    if code is not None:
        return code
    code = fatbin.packed(nvrtc.compiled(text, name, architecture()), architecture())
    try:
        atomic_files.write(path, hashlib.sha256(code).digest() + code)
    except OSError as error:
        logger.warning("the cubin of %s cannot be stored (%s): every process compiles it again", name, error)
    return code


def _read(path: Path) -> bytes | None:
    """Return the code stored at `path`, or None where it is missing or damaged (loading damaged code ends a run)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest = data[:_DIGEST]
    code = data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def architecture() -> str:
    """Return the compiler's name for the architecture of MLX's device, such as sm_90a.

    The suffix a allows instructions that only this generation has.
    """
    generation = nvidia.generation()
    return f"sm_{generation}{'a' if generation >= nvidia.HOPPER else ''}"
