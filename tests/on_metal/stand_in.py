"""Runs commands of deltatune "on Metal", on Linux: the Metal text runs on the host machine, inside MLX's own graph.

usage: stand_in.py [--smaller] [--macos] [--marks FILE] FOLDER < COMMANDS

COMMANDS is a JSON list of lists of arguments; "on the CPU" before a command makes the CPU the default device, as on a
Mac whose user chose that, and "short demo" is the demo with fewer iterations and questions. FOLDER keeps compiled
kernels. --smaller is for sizes that CI can pay for (smaller.py), --macos for a system that looks like macOS (macos.py),
--marks for noting which statements run (marks.py).
After each command a line of JSON tells its exit code, the limits of wired memory that it set, and by kernel how often
it was put into a graph.
"""

# ruff: noqa: E402

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import marks

if "--macos" in sys.argv:
    import macos

    macos.declare(Path(sys.argv[-1]))
if "--marks" in sys.argv:
    marks.install(Path(sys.argv[sys.argv.index("--marks") + 1]))
import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import apple_gpu
import gpu_operations
import mlx.core as mx
import numpy as np
import upstreams_kernels

from beside import load
from deltatune.machine import compiling
from deltatune.ops.attention import trial_case
from deltatune.ops.operator import timing

_UNTIL_THE_END = ExitStack()
# The place in Python's array at which nanobind keeps the distance to MLX's.
_OFFSET = 16


def built(folder: Path) -> Path:
    """Compile the primitive against the headers in mlx's wheel, and return the library."""
    text = HERE / "host_primitive.cpp"
    library = folder / f"host_primitive_{mx.__version__}_{hashlib.sha256(text.read_bytes()).hexdigest()[:8]}.so"
    if not library.exists():
        made, package = folder / f"host_primitive.{os.getpid()}.so", Path(mx.__file__).parent
        command = ["g++", "-O1", "-fPIC", "-shared", "-std=c++20", str(text), "-o", str(made)]
        subprocess.run([*command, f"-I{package / 'include'}", f"-L{package / 'lib'}", "-lmlx"], check=True)
        os.replace(made, library)
    return library


class Metal:
    """Makes mx.fast.metal_kernel run on the host machine; `attached` counts the calls of each kernel in graphs."""

    def __init__(self, folder: Path, optimised: bool):
        self.attached: Counter[str] = Counter()
        self._optimised = optimised
        self._host = load(HERE.parent / "ops" / "kernels" / "host_machine.py")
        self._folder, self._machines = folder, {}
        self._primitive = ctypes.CDLL(str(built(folder)))
        self._primitive.attach.restype = ctypes.c_char_p

    def kernel(
        self, name: str, input_names: list[str], output_names: list[str], source: str, header: str = "", **_: Any
    ) -> Callable[..., list[mx.array]]:
        """Stands in for mx.fast.metal_kernel. Kernels of upstream's are computed by array operations."""
        if not header:
            return upstreams_kernels.kernel(name)
        body = re.sub(r"_[0-9a-f]{8}$", "", name)

        def call(*, inputs: list, output_shapes: list, output_dtypes: list, grid: tuple, threadgroup: tuple, template):
            given = [mx.contiguous(x) for x in inputs]
            outputs = dict(zip(output_names, zip(output_shapes, output_dtypes, strict=True), strict=True))
            blocks, groups = (grid[0] // threadgroup[0], grid[1], grid[2]), threadgroup[0] // 32
            launch = SimpleNamespace(
                name=body, source=source, outputs=outputs, blocks=blocks, groups=groups, changes=()
            )
            launch.inputs, launch.values = dict(zip(input_names, given, strict=True)), dict(template)
            return self._attached(header, launch)

        return call

    def _attached(self, header: str, launch: Any) -> list[mx.array]:
        if header not in self._machines:
            text = self._host.with_rough_exponentials(header, "exp2")
            self._machines[header] = self._host.HostMachine(self._folder, text, optimised=self._optimised)
        machine = self._machines[header]
        machine.compile([launch])
        entry = ctypes.cast(machine.entries[self._host.specialise(launch)[0]], ctypes.c_void_p)
        operands = [array for _, _, array in self._host.operands(launch)]
        results = [mx.zeros(shape, dtype) for shape, dtype in launch.outputs.values()]
        arrays = [(ctypes.c_void_p * len(x))(*map(_within, x)) for x in (operands, results)]
        blocks, lanes, name = (ctypes.c_int * 3)(*launch.blocks), launch.groups * 32, launch.name.encode()
        problem = self._primitive.attach(arrays[0], len(operands), arrays[1], len(results), entry, blocks, lanes, name)
        if problem:
            raise RuntimeError(problem.decode())
        self.attached[launch.name] += 1
        return results


def _within(array: mx.array) -> int:
    """Return the address of MLX's array inside Python's."""
    (distance,) = np.frombuffer(ctypes.string_at(id(array) + _OFFSET, 4), np.int32)
    return id(array) + int(distance)


def install(folder: Path, optimised: bool) -> tuple[Metal, apple_gpu.Devices]:
    """Declare an Apple GPU, whose kernels run on the host machine and are kept in `folder`.

    Optimised kernels take three times as long to compile, and a quarter to run.
    """
    metal = Metal(folder, optimised)
    # On Metal MLX fuses operations into kernels, and each would take g++ half a second here. A context manager that
    # nothing holds would end at once.
    _UNTIL_THE_END.enter_context(compiling.without_kernels())
    devices = apple_gpu.declare()
    gpu_operations.declare(devices)
    mx.fast.metal_kernel = metal.kernel
    # The host machine is slow, so the fastest would never be a kernel: where no time passes, the preferred one serves.
    timing.clock = lambda: 0.0
    timing.ROUNDS, trial_case._TIMED_LENGTH, trial_case._TIMED_KEY_HEADS = 1, 64, 1
    return metal, devices


def ended(command: list[str]) -> int:
    """Run a command and return its exit code."""
    from deltatune import cli
    from deltatune.demo import flow

    if command[0] != "short demo":
        return cli.main(command)
    _, output, iterations, questions = command
    return flow.run_demo(output, iterations=int(iterations), questions=int(questions))


def main() -> None:
    smaller = "--smaller" in sys.argv
    commands = json.loads(sys.stdin.read())
    metal, devices = install(Path(sys.argv[-1]), optimised=not smaller)
    if smaller:
        import smaller as sizes

        sizes.declare()
    for command in commands:
        metal.attached.clear()
        devices.wired.clear()
        on_cpu = command[0] == "on the CPU"
        devices.default = mx.Device(mx.cpu if on_cpu else mx.gpu, 0)
        code = ended(command[on_cpu:])
        sys.stdout.flush()
        print("\n" + json.dumps({"code": code, "wired": devices.wired, "kernels": metal.attached}), flush=True)


if __name__ == "__main__":
    main()
