"""The text of a kernel as a Mac's compiler gets it, changed no more than clang's C++ for OpenCL asks for.

That language has Metal's address spaces as its own: a pointer without one is to the lane's private memory, and every
wrong space is an error. What differs: OpenCL has no templates of kernels and no references as their parameters, so
that the template's arguments become constants and types before the kernel; and positions are declared functions.
"""

from __future__ import annotations

import re
from pathlib import Path

import mlx
import mlx.core as mx

from deltatune.ops.kernels.launch import Launch, header, stripped

HERE = Path(__file__).parent
_KERNELS = Path(mlx.__path__[0]) / "include" / "mlx" / "backend" / "metal" / "kernels"
# In this order MLX joins them into the text that it puts before each custom kernel (metal::utils() in libmlx.dylib).
# The wheels for Linux have the same files.
PRELUDE = ("bf16", "bf16_math", "complex", "defines", "logging", "utils")
TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.bool_: "bool",
}
POSITIONS = {
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
}
MOST_BUFFERS = 31


def prelude() -> str:
    """Return the text that MLX puts before every custom kernel."""
    texts = [(_KERNELS / f"{name}.h").read_text() for name in PRELUDE]
    return "\n".join(re.sub(r'^#(include "mlx.*|pragma once)\n', "", text, flags=re.MULTILINE) for text in texts)


def for_opencl(text: str) -> str:
    """Return Metal text without what C++ for OpenCL has no words for.

    A method's own space is the lane's memory there already. Complex numbers, which no kernel of ours uses, are not
    constructed in braces.
    """
    text = re.sub(r"^#include <metal.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"static_assert\(\s*\(complex_t.*?;\n", "", text, flags=re.DOTALL)
    text = re.sub(r"inline complex64_t log1p.*?\n}\n", "", text, flags=re.DOTALL)
    return re.sub(r"\)(\s*const)?\s+thread(?=\s*[:{;])", r")\1", text)


def library() -> str:
    """Return the declarations that stand in for Metal's library, of what the prelude calls beneath it, too."""
    beneath = sorted(set(re.findall(r"\b__metal_\w+", prelude())))
    declared = "".join(f"template <typename... Given> float {name}(Given...);\n" for name in beneath)
    return (HERE / "metal_stdlib.h").read_text() + declared


def before_kernels() -> str:
    """Return what comes before every kernel: Metal's library, then MLX's prelude."""
    return library() + for_opencl(prelude())


def kernel(launch: Launch) -> str:
    """Return the text of a launch's kernel, from our header on, under the name `launched`.

    ValueError for more buffers than Metal allows.
    """
    values = []
    for name, value in launch.values.items():
        if isinstance(value, mx.Dtype):
            values.append(f"typedef {TYPES[value]} {name};")
        else:
            values.append(f"constexpr constant {type(value).__name__} {name} = {str(value).lower()};")
    parameters, references = [], []
    for name, array in launch.inputs.items():
        # The rules of mx.fast.metal_kernel (mlx/backend/common/metal_kernel.cpp).
        space = "constant" if array.size < 8 else "device"
        parameters.append(f"const {space} {TYPES[array.dtype]}* {name}{'' if array.ndim else '_at'}")
        if not array.ndim:
            references.append(f"const {space} {TYPES[array.dtype]}& {name} = *{name}_at;")
        elif f"{name}_shape" in launch.source:
            parameters.append(f"const constant int* {name}_shape")
    parameters += [f"device {TYPES[dtype]}* {name}" for name, (_, dtype) in launch.outputs.items()]
    if len(parameters) > MOST_BUFFERS:
        raise ValueError(f"{launch.name}: {len(parameters)} buffers, and Metal has {MOST_BUFFERS}")
    used = {name: kind for name, kind in POSITIONS.items() if name in launch.source}
    declared = [f"{kind} here_{name}();" for name, kind in used.items()]
    positions = [f"const {kind} {name} = here_{name}();" for name, kind in used.items()]
    lines = [for_opencl(stripped(header("metal", launch.kernel.files))), *values, *declared]
    lines += [f"__kernel void launched({', '.join(parameters)}) {{", *references, *positions, launch.source, "}"]
    return "\n".join(lines)
