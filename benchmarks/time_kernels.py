"""Times kernels that recorded_kernels.py compiled, each by itself, on an NVIDIA GPU with PyTorch and without MLX.

usage: python benchmarks/time_kernels.py FOLDER... [--calls 20] [--once]

Prints for each size and folder the microseconds of all kernels in a row and of each, with the TB/s if each array were
read or written once (the first line has those of a copy); whether five runs gave the same bits, and how far the results
are from those of the first folder, in their norm. With --once each kernel runs once, and what is not finite is named:
for compute-sanitizer and ncu.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import processes
from machine import heading
from sizes import Size, inputs

# CUfunction_attribute of CUDA's cuda.h: the most shared memory that a block may ask for at its launch.
DYNAMIC_BYTES = 8
RESULTS = ("y", "last", "dq", "dk", "dv", "d_log_g", "d_beta", "d_initial")
GATES = ("log_g", "beta")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}
Arrays = dict[str, torch.Tensor]


class Driver:
    """Launches machine code by the CUDA driver, on PyTorch's stream."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[tuple[Path, str], ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with code {status}")

    def function(self, path: Path, name: str, size: int) -> ctypes.c_void_p:
        if (path, name) not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), path.read_bytes())
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self.call("cuFuncSetAttribute", function, DYNAMIC_BYTES, size)
            self.functions[path, name] = function
        return self.functions[path, name]

    def launch(self, folder: Path, kernel: dict[str, Any], arrays: Arrays) -> None:
        function = self.function(folder / kernel["code"], kernel["name"], kernel["bytes"])
        names = [*kernel["inputs"], *kernel["outputs"]]
        values = [ctypes.c_void_p(arrays[name].data_ptr()) for name in names]
        values += [ctypes.c_int(number) for number in kernel["scalars"]]
        places = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (*kernel["blocks"], kernel["threads"], 1, 1, kernel["bytes"])
        self.call("cuLaunchKernel", function, *sizes, stream, places, None)


def drawn(size: Size, kernels: list[dict[str, Any]]) -> Arrays:
    """The inputs of a call and its cotangents, and its outputs, which start as NaN."""
    given, last = inputs(size), (size.batch, size.value_heads, size.head_size, size.head_size)
    arrays = {"initial": torch.zeros(8, 1, 1, 1, device="cuda"), "d_last": torch.full(last, 0.1, device="cuda")}
    for name, x in (given.arrays | {"dy": given.dy}).items():
        array = torch.tensor(x, device="cuda").repeat(*given.times, *(1,) * (x.ndim - 2))
        arrays[name] = array if name in GATES else array.bfloat16()
    for kernel in kernels:
        for name, (shape, dtype) in kernel["outputs"].items():
            poison = -1 if dtype == "int32" else float("nan")
            arrays[name] = torch.full(shape, poison, device="cuda", dtype=DTYPES[dtype])
    return arrays


def microseconds(run: Callable[[], None], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def copy_rate() -> float:
    """Return the TB/s, read and written, of a copy of 2 GB."""
    source, to = torch.randn(2, 1 << 29, device="cuda").unbind()
    return 2e-6 * source.nbytes / microseconds(lambda: to.copy_(source), 20)


def measure(driver: Driver, folder: Path, size: Size, kernels: list[dict[str, Any]], calls: int) -> tuple[str, Arrays]:
    """Return the words for a folder's times at a size, and its results; without calls, what is not finite."""
    arrays = drawn(size, kernels)

    def run_all() -> None:
        for kernel in kernels:
            driver.launch(folder, kernel, arrays)

    def run_alone(kernel: dict[str, Any]) -> None:
        # What another kernel of the call sets to zero.
        for name in kernel.get("changes", ()):
            arrays[name].zero_()
        driver.launch(folder, kernel, arrays)

    run_all()
    torch.cuda.synchronize()
    results = {name: arrays[name].float() for name in RESULTS}
    if not calls:
        wrong = [name for name, array in results.items() if not bool(torch.isfinite(array).all())]
        return f"not finite: {', '.join(wrong) or 'nothing'}", results
    same = True
    for _ in range(4):
        run_all()
        torch.cuda.synchronize()
        same &= all(torch.equal(arrays[name].float(), results[name]) for name in RESULTS)
    each = []
    for kernel in kernels:
        time = microseconds(lambda kernel=kernel: run_alone(kernel), calls)
        rate = sum(arrays[name].nbytes for name in (*kernel["inputs"], *kernel["outputs"])) / time / 1e6
        each.append(f"{kernel['name'].removeprefix('gated_delta_hopper_')} {time:.1f} at {rate:.2f}")
    told = f"{microseconds(run_all, calls):.1f} us ({', '.join(each)}), {'same' if same else 'OTHER'} bits"
    return told, results


def main() -> None:
    options = parse()
    driver, first = Driver(), options.folders[0]
    print(f"{heading()}; a copy: {copy_rate():.2f} TB/s", flush=True)
    for path in sorted(first.glob("*.json")):
        reference: Arrays | None = None
        for folder in options.folders:
            plan = json.loads((folder / path.name).read_text())
            size, calls = Size.of_record(plan["size"]), 0 if options.once else options.calls
            told, results = measure(driver, folder, size, plan["launches"], calls)
            reference = reference or results
            far = [
                f"{name} {((results[name] - own).norm() / own.norm()).item():.1e}" for name, own in reference.items()
            ]
            print(f"{path.stem} {folder.name}: {told}; {', '.join(far)}", flush=True)


def parse() -> argparse.Namespace:
    parser = processes.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--once", action="store_true", help="one launch each, no times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
