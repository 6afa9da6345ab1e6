"""Kernels for NVIDIA GPUs, built once a machine: mx.fast.cuda_kernel builds each in every process, 1.6 s apiece."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from ... import environment, kept, nvidia
from . import nvrtc

logger = logging.getLogger(__name__)

_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.bool_: "bool",
}
_PROLOGUE = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
_DIGEST = hashlib.sha256().digest_size
Constants = Sequence[tuple[str, int | bool | mx.Dtype]]


# Compared by identity: launch.py makes one for each text.
@dataclass(frozen=True, eq=False)
class Kernel:
    """The text between the braces of a kernel, which may read an input's shape as NAME_shape, and what goes before it.

    Called as mx.fast.cuda_kernel's kernels are. `threads`: how many a block has, where its registers are to be shared
    out among them; 0 leaves the compiler what a thread may have at most.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str
    shared_memory: int
    threads: int = 0

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Constants,
    ) -> list[mx.array]:
        shaped = [array.shape if wanted else () for array, wanted in zip(inputs, _shaped(self), strict=True)]
        dtypes, axes = tuple(array.dtype for array in inputs), tuple(map(len, shaped))
        return mx.fast.precompiled_cuda_kernel(
            name=self.name,
            compiled_source=_built(self, tuple(template), dtypes, axes, tuple(output_dtypes)),
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[size for shape in shaped for size in shape],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self.shared_memory,
            ensure_row_contiguous=True,
        )

    def text(
        self, constants: Constants, dtypes: Sequence[mx.Dtype], axes: Sequence[int], results: Sequence[mx.Dtype]
    ) -> str:
        """The whole text, for inputs of `dtypes` and outputs of `results`; `axes` counts those of the shapes read."""
        sizes = [
            (name, [f"{name}_{axis}" for axis in range(count)]) for name, count in zip(self.inputs, axes, strict=True)
        ]
        parameters = [f"const {_TYPES[dtype]}* {name}" for name, dtype in zip(self.inputs, dtypes, strict=True)]
        parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in zip(self.outputs, results, strict=True)]
        parameters += [f"const int {size}" for _, each in sizes for size in each]
        lines = [_constant(*constant) for constant in constants]
        lines += [f"const int {name}_shape[] = {{{', '.join(each)}}};\n" for name, each in sizes if each]
        bounds = f"__launch_bounds__({self.threads}, 1) " if self.threads else ""
        start = f'extern "C" __global__ void {bounds}{self.name}({", ".join(parameters)}) {{\n'
        return "".join([_PROLOGUE, self.header, start, *lines, self.source, "}\n"])


def _constant(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_TYPES[value]};\n"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};\n"


@cache
def _shaped(kernel: Kernel) -> tuple[bool, ...]:
    return tuple(f"{name}_shape" in kernel.source for name in kernel.inputs)


@cache
def _built(kernel: Kernel, *kind: tuple) -> bytes:
    return code_of(kernel.name, kernel.text(*kind))


def code_of(name: str, text: str) -> bytes:
    """The cubin of this text for MLX's device: from the cache folder, else built now and kept there."""
    key = hashlib.sha256(f"{architecture()} {nvrtc.version()} {text}".encode()).hexdigest()
    path = environment.cache_directory() / "cubins" / f"{key[:32]}.cubin"
    code = _found(path)
    if code is not None:
        return code
    code = nvrtc.compiled(text, name, architecture())
    try:
        kept.write(path, hashlib.sha256(code).digest() + code)
    except OSError as error:
        logger.warning("%s cannot be kept (%s): it is built again in every process", name, error)
    return code


def _found(path: Path) -> bytes | None:
    """The code kept at `path`, unless it is damaged: loading that would end a training."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def architecture() -> str:
    """Of MLX's device, as the compiler calls it: sm_90a. The a admits what belongs to that generation alone."""
    found = nvidia.generation()
    return f"sm_{found}{'a' if found >= nvidia.HOPPER else ''}"
