"""Compiles the Metal text with clang for this machine and runs it, by MLX's own rules for signatures."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from deltatune.ops.kernels.launch import FOLDER, Launch, header

TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "half",
    mx.int32: "int",
    mx.bool_: "bool",
    mx.uint32: "uint",
}
ATTRIBUTES = {
    "threadgroup_position_in_grid": ("uint3", "host::block_position"),
    "thread_index_in_threadgroup": ("uint", "(uint)host::current"),
    "simdgroup_index_in_threadgroup": ("uint", "(uint)host::current / 32"),
    "thread_index_in_simdgroup": ("uint", "(uint)host::current % 32"),
}
GUARD = 64
MOST_BUFFERS = 31


class HostFault(AssertionError):
    """What a Mac would have refused, or got wrong."""


def compiler() -> list[str]:
    clang = shutil.which("clang++")
    if clang:
        return [clang]
    return [sys.executable, "-m", "ziglang", "c++"]


def specialise(index: int, launch: Launch) -> str:
    """The kernel function that mx.fast.metal_kernel would write, and an entry that runs its blocks."""
    template, values = [], []
    for name, value in launch.values.items():
        kind = "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"
        template.append(f"{kind} {name}")
        values.append(TYPES[value] if isinstance(value, mx.Dtype) else str(value).lower())
    if len(launch.inputs) + len(launch.outputs) > MOST_BUFFERS:
        raise HostFault(f"{launch.name}: over {MOST_BUFFERS} buffers")
    parameters, arguments, buffers, shapes = [], [], 0, ""
    for name, array in launch.inputs.items():
        place = "constant" if array.size < 8 else "device"
        parameters.append(f"const {place} {TYPES[array.dtype]}* {name}")
        arguments.append(f"(const {place} {TYPES[array.dtype]}*)buffers[{buffers}]")
        buffers += 1
        if f"{name}_shape" in launch.source:
            parameters.append(f"const constant int* {name}_shape")
            arguments.append(f"(const constant int*)shape_of_{name}")
            shapes += f"const int shape_of_{name}[] = {{{', '.join(map(str, array.shape))}}};\n"
    for name, (_, dtype) in launch.outputs.items():
        parameters.append(f"device {TYPES[dtype]}* {name}")
        arguments.append(f"(device {TYPES[dtype]}*)buffers[{buffers}]")
        buffers += 1
    for name, (kind, value) in ATTRIBUTES.items():
        if name in launch.source:
            parameters.append(f"{kind} {name}")
            arguments.append(value)
    return f"""
namespace space_{index} {{
template <{", ".join(template)}>
void run({", ".join(parameters)}) {{
{launch.source}}}
{shapes}void** buffers;
void body() {{ run<{", ".join(values)}>({", ".join(arguments)}); }}
}}
extern "C" const char* kernel_{index}(void** buffers, int x, int y, int z, int threads, uint64_t seed) {{
  space_{index}::buffers = buffers;
  host::body = &space_{index}::body;
  host::random_state = seed;
  host::fault[0] = 0;
  for (host::block_position.z = 0; host::block_position.z < (uint)z; ++host::block_position.z)
    for (host::block_position.y = 0; host::block_position.y < (uint)y; ++host::block_position.y)
      for (host::block_position.x = 0; host::block_position.x < (uint)x; ++host::block_position.x)
        if (!host::run_block(threads)) return host::fault;
  return host::fault;
}}
"""


class HostMachine:
    """Runs launches; each specialisation is compiled once into `folder`."""

    def __init__(self, folder: Path | None = None, text: str | None = None):
        self.folder = Path(folder or tempfile.mkdtemp())
        self.text = header("metal") if text is None else text
        self.built: dict[str, ctypes.CDLL] = {}

    def compile(self, launches: list[Launch]) -> list:
        source = (FOLDER / "host.h").read_text() + self.text
        source += "".join(specialise(index, launch) for index, launch in enumerate(launches))
        key = hashlib.sha256(source.encode()).hexdigest()[:16]
        if key not in self.built:
            library = self.folder / f"{key}.so"
            if not library.exists():
                file = self.folder / f"{key}.cpp"
                file.write_text(source)
                flags = ["-x", "c++", "-std=c++17", "-O1", "-nostdinc++", "-nostdlib++", "-shared", "-fPIC", "-w"]
                flags += ["-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
                command = [*compiler(), *flags, str(file), "-o", str(library)]
                result = subprocess.run(command, capture_output=True, text=True)
                if result.returncode:
                    raise HostFault(result.stderr[:4000])
            self.built[key] = ctypes.CDLL(str(library))
        library = self.built[key]
        entries = [getattr(library, f"kernel_{index}") for index in range(len(launches))]
        for entry in entries:
            entry.restype = ctypes.c_char_p
            entry.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_uint64]
        return entries

    def run(self, launch: Launch, seed: int = 1) -> list[mx.array]:
        """Outputs start as NaN between guards; a value left NaN, or a guard written, is for the caller to see."""
        (entry,) = self.compile([launch])
        held = [_bytes(array) for array in launch.inputs.values()]
        outputs = []
        for shape, dtype in launch.outputs.values():
            size = int(np.prod(shape)) * dtype.size
            outputs.append(np.full(size + 2 * GUARD, 0xFF, np.uint8))
        pointers = [array.ctypes.data + GUARD for array in (*held, *outputs)]
        buffers = (ctypes.c_void_p * len(pointers))(*pointers)
        fault = entry(buffers, *launch.blocks, launch.groups * 32, seed)
        if fault:
            raise HostFault(f"{launch.name}: {fault.decode()}")
        results = []
        for raw, (name, (shape, dtype)) in zip(outputs, launch.outputs.items(), strict=True):
            if (raw[:GUARD] != 0xFF).any() or (raw[-GUARD:] != 0xFF).any():
                raise HostFault(f"{launch.name}: a write outside {name}")
            bits = mx.array(np.frombuffer(raw[GUARD:-GUARD].tobytes(), np.uint16 if dtype.size == 2 else np.uint32))
            results.append(bits.view(dtype).reshape(shape))
        return results


def _bytes(array: mx.array) -> np.ndarray:
    """The array's bytes between guards of NaN."""
    flat = mx.contiguous(array).reshape(-1)
    raw = np.array(flat.astype(mx.uint8) if array.dtype == mx.bool_ else flat.view(mx.uint8))
    return np.concatenate([np.full(GUARD, 0xFF, np.uint8), raw.view(np.uint8), np.full(GUARD, 0xFF, np.uint8)])
