"""Compiles the Metal text with clang for this machine and runs it, by MLX's own rules for signatures."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
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
MOST_BUFFERS = 31
SPACES = ("device", "constant", "threadgroup", "thread", "GLOBAL")
# C++14 and no double, as in Metal; nothing from a C++ library, so that any clang will do.
FLAGS = ["-x", "c++", "-std=c++14", "-shared", "-fPIC", "-nostdinc++", "-nostdlib++", "-ffp-contract=off"]
# Not optimised, since compiling is most of the time; -O1 is for the runtime that zig builds once, five times sooner so.
FLAGS += ["-O1", "-Xclang", "-O0"]
FLAGS += ["-fno-exceptions", "-fno-rtti", "-fno-sanitize=all", "-Wno-everything"]
FLAGS += ["-Werror=c++17-extensions", "-Werror=c++20-extensions", "-Werror=double-promotion"]
# Calls the watch of host.h at every load and store.
WATCH = ["-DDELTATUNE_WATCH", "-fsanitize-coverage=edge,trace-loads,trace-stores"]


class HostError(AssertionError):
    """What a Mac would have refused, or got wrong."""


def compiler() -> list[str]:
    clang = shutil.which("clang++")
    return [clang] if clang else [sys.executable, "-m", "ziglang", "c++"]


@cache
def without_address_space(text: str) -> list[str]:
    """Pointers and references of `text` that name no address space: an error in Metal, none for clang on a CPU."""
    text = re.sub(r"//[^\n]*|#[^\n]*", "", text)
    types = {"void", "bool", "char", "int", "uint", "long", "float", "half", "bfloat16_t", "auto"}
    types |= set(re.findall(r"\b(?:typename|struct|using)\s+(\w+)", text))
    named = rf"(?:typename\s+[\w:]+|(?:{'|'.join(sorted(types))})(?:<[^;(){{}}]*?>)?)"
    pattern = rf"(?:^|[,;({{}}<>])\s*((?:\w+\s+)*?)({named}\s*[*&]+)(?=\s*[A-Za-z_]\w*\s*[,)=;\[]|\s*[,)>])"
    return [found[1] for found in re.findall(pattern, text, re.MULTILINE) if not set(found[0].split()) & set(SPACES)]


def operands(launch: Launch) -> list[tuple[str, str, mx.array]]:
    """The inputs as mx.fast.metal_kernel passes them: name, type and what it points to."""
    found = []
    for name, array in launch.inputs.items():
        place = "constant" if array.size < 8 else "device"
        found.append((name, f"const {place} {TYPES[array.dtype]}{'*' if array.ndim else '&'}", array))
        if array.ndim and f"{name}_shape" in launch.source:
            found.append((f"{name}_shape", "const constant int*", mx.array(array.shape, dtype=mx.int32)))
    return found


def specialise(launch: Launch) -> tuple[str, str]:
    """The kernel function that mx.fast.metal_kernel would write, with an entry that runs its blocks; its name."""
    values = [TYPES[value] if isinstance(value, mx.Dtype) else str(value).lower() for value in launch.values.values()]
    kinds = {mx.Dtype: "typename", bool: "bool", int: "int"}
    template = [f"{kinds[type(value)]} {name}" for name, value in launch.values.items()]
    buffers = [(name, kind) for name, kind, _ in operands(launch)]
    inputs = len(buffers)
    buffers += [(name, f"device {TYPES[dtype]}*") for name, (_, dtype) in launch.outputs.items()]
    if len(buffers) > MOST_BUFFERS:
        raise HostError(f"{launch.name}: {len(buffers)} buffers, and Metal has {MOST_BUFFERS}")
    parameters = [f"{kind} {name}" for name, kind in buffers]
    arguments = [
        f"({kind})host::buffers[{index}].start" if kind[-1] == "*" else f"*({kind[:-1]}*)host::buffers[{index}].start"
        for index, (_, kind) in enumerate(buffers)
    ]
    used = [(name, *what) for name, what in ATTRIBUTES.items() if name in launch.source]
    parameters += [f"{kind} {name}" for name, kind, _ in used]
    arguments += [value for *_, value in used]
    names = ", ".join(f'"{name}"' for name, _ in buffers)
    parameterised = f"template <{', '.join(template)}>" if template else ""
    specialised = f"run<{', '.join(values)}>" if values else "run"
    text = f"""
{parameterised}
void run({", ".join(parameters)}) {{
{launch.source}}}
static void body() {{ {specialised}({", ".join(arguments)}); }}
static const char* const names[] = {{{names}}};
"""
    entry = f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return (
        entry,
        f"""
namespace {entry}_space {{{text}}}
extern "C" const char* {entry}(void** data, const uint64_t* sizes, int x, int y, int z, int threads, uint64_t seed) {{
  return host::run_kernel({entry}_space::body, {entry}_space::names, data, sizes, {inputs}, {len(buffers)},
                          {{(uint)x, (uint)y, (uint)z}}, threads, seed);
}}
""",
    )


class HostMachine:
    """Runs launches of `text`; each specialisation is compiled once, into `folder`, and kept there.

    watch: every access to threadgroup memory is looked at for races, whatever the order of lanes.
    bytes: how much threadgroup memory a block may have; a Mac's by default.
    cuda: the text is CUDA's alone, where pointers name no address space; optimised, for its tiles are large.
    """

    def __init__(
        self,
        folder: Path,
        text: str | None = None,
        watch: bool = False,
        bytes: int | None = None,
        cuda: bool = False,
    ):
        self.folder = Path(folder)
        self.flags = FLAGS + WATCH * watch + ([f"-DDELTATUNE_THREADGROUP_BYTES={bytes}"] if bytes else [])
        self.cuda = cuda
        if cuda:
            self.flags = [flag for flag in self.flags if flag not in ("-Xclang", "-O0")]
        self.text = header("metal") if text is None else text
        self.entries: dict[str, ctypes._CFuncPtr] = {}

    def compile(self, launches: Iterable[Launch]) -> None:
        """One library of all the launches that are not there yet."""
        needed = dict(specialise(launch) for launch in launches)
        needed = {entry: text for entry, text in needed.items() if entry not in self.entries}
        if not needed:
            return
        spaceless = [] if self.cuda else without_address_space(self.text)
        if spaceless:
            raise HostError(f"no address space: {'; '.join(spaceless)}")
        library = ctypes.CDLL(
            str(self._library((FOLDER / "host.h").read_text() + self.text + "".join(needed.values())))
        )
        for entry in needed:
            function = getattr(library, entry)
            function.restype = ctypes.c_char_p
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_uint64]
            self.entries[entry] = function

    def _library(self, source: str) -> Path:
        key = hashlib.sha256("\n".join([source, *self.flags, *compiler()]).encode()).hexdigest()[:16]
        library = self.folder / f"{key}.so"
        if not library.exists():
            # Of this process alone: another one's compiler may be reading its own.
            file, made = (self.folder / f"{key}.{os.getpid()}.{kind}" for kind in ("cpp", "so"))
            file.write_text(source)
            command = [*compiler(), *self.flags, str(file), "-o", str(made)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise HostError(result.stderr[:4000])
            os.replace(made, library)
        return library

    def run(self, launch: Launch, seed: int = 1) -> list[mx.array]:
        """The outputs, which start as NaN. `seed` decides the order of blocks, groups and lanes."""
        entry, _ = specialise(launch)
        self.compile([launch])
        held = [_bytes(array) for _, _, array in operands(launch)]
        outputs = [np.empty(int(np.prod(shape)) * dtype.size, np.uint8) for shape, dtype in launch.outputs.values()]
        held += outputs
        pointers = (ctypes.c_void_p * len(held))(*[array.ctypes.data for array in held])
        sizes = (ctypes.c_uint64 * len(held))(*[array.size for array in held])
        fault = self.entries[entry](pointers, sizes, *launch.blocks, launch.groups * 32, seed)
        if fault:
            raise HostError(f"{launch.name}: {fault.decode()}")
        results = []
        for raw, (shape, dtype) in zip(outputs, launch.outputs.values(), strict=True):
            results.append(mx.array(raw.view(np.uint16 if dtype.size == 2 else np.uint32)).view(dtype).reshape(shape))
        return results


def _bytes(array: mx.array) -> np.ndarray:
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.astype(mx.uint8) if array.dtype == mx.bool_ else flat.view(mx.uint8))
