"""Compiles the gated delta rule's kernels for Hopper, which needs no GPU; time_kernels.py launches them on one.

usage: python benchmarks/recorded_kernels.py FOLDER SIZE... [--racecheck]

A size is written as for gated_delta.py: 1x8192x16/32, or 1x8192x32/32/channel. FOLDER gets the machine code of the
kernels of a call, forward and backward, and a file of their arguments for each size. The assembler's report is printed:
registers, what they spill, and products that it runs one after another. Kernels that are in the cache (DELTATUNE_CACHE)
are not compiled again and have no report. PYTHONPATH=OTHER/src compiles another checkout's kernels, and
LD_PRELOAD=.../libnvrtc.so.13 compiles with another release of CUDA. --racecheck makes kernels for compute-sanitizer's
racecheck, which does not see that one lane reports to a barrier for its whole group: in these kernels every lane
reports.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.machine import nvidia
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_on
from deltatune.ops.kernels import cubin, launch, nvrtc
from deltatune.ops.kernels.launch import Launch, on
from sizes import Size

DTYPES = {mx.bfloat16: "bfloat16", mx.float32: "float32", mx.int32: "int32"}
TOLD = re.compile(r"registers|spill|Potential")


class Recorder:
    """Stands in for MLX's launches: writes their machine code and keeps their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: list[dict[str, Any]] = []
        self.given: dict[str, Any] = {}
        launch._machine = lambda: "cuda"
        cubin.architecture = lambda: "sm_90a"
        nvidia.generation = lambda: nvidia.HOPPER
        nvidia.limits = lambda: nvidia.H200
        nvrtc.compiled = compiled
        mx.fast.precompiled_cuda_kernel = self.launched

    def launched(self, **given: Any) -> list[mx.array]:
        self.given = given
        return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

    def run(self, kernel: Launch) -> list[mx.array]:
        """Record a launch and return arrays of its outputs' shapes."""
        outputs = kernel.run()
        code = self.given["compiled_source"]
        name = f"{hashlib.sha256(code).hexdigest()[:16]}.cubin"
        (self.folder / name).write_bytes(code)
        self.plan.append(
            {
                "name": kernel.name,
                "code": name,
                "inputs": list(kernel.inputs),
                "outputs": {key: [list(shape), DTYPES[dtype]] for key, (shape, dtype) in kernel.outputs.items()},
                "changes": list(kernel.changes),
                "scalars": list(self.given["scalars"]),
                "blocks": list(kernel.blocks),
                "threads": kernel.groups * 32,
                "bytes": kernel.bytes,
            }
        )
        return outputs


def compiled(text: str, name: str, architecture: str) -> bytes:
    code, report = nvrtc.compiled_with_report(text, name, architecture)
    for line in filter(TOLD.search, report.splitlines()):
        print(f"{name}: {line.strip()}", flush=True)
    return code


def record(size: Size, recorder: Recorder) -> None:
    """Trace a call of `size` forward and backward; `recorder` runs its launches."""
    rows = (size.batch, size.tokens)
    q, v = (mx.zeros((*rows, heads, size.head_size), mx.bfloat16) for heads in (size.key_heads, size.value_heads))
    log_g, beta = mx.zeros(v.shape if size.per_channel else v.shape[:3]), mx.zeros(v.shape[:3])

    def call(*arrays: mx.array) -> list[mx.array]:
        return list(gated_delta_fused(*arrays, tiling_of_call=tiling_on("cuda")))

    state = mx.zeros((size.batch, size.value_heads, size.head_size, size.head_size))
    with on(recorder.run):
        mx.vjp(call, [q, q, v, log_g, beta], [v, state])


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", nargs="+", metavar="SIZE")
    parser.add_argument("--racecheck", action="store_true", help="every lane reports to barriers")
    options = parser.parse_args()
    if options.racecheck:
        header = launch.header
        launch.header = lambda *of: f"#define DELTATUNE_RACECHECK\n{header(*of)}"
    options.folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(options.folder)
    for text in options.sizes:
        recorder.plan = []
        size = Size.written(text)
        record(size, recorder)
        path = options.folder / f"{text.replace('/', '-')}.json"
        path.write_text(json.dumps({"size": size.record(), "launches": recorder.plan}, indent=1))
        print(f"{text}: {path}", flush=True)


if __name__ == "__main__":
    main()
