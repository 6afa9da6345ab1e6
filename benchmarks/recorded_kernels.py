"""Compiles the gated delta rule's kernels for Hopper, which needs no GPU; time_kernels.py launches them on one.

usage: python benchmarks/recorded_kernels.py FOLDER SIZE...

A size is written as for gated_delta.py: 1x8192x16/32. FOLDER gets the machine code of the kernels of a call, forward
and backward, and a file of their arguments for each size. The assembler's report is printed: registers, what they
spill, and products that it runs one after another. PYTHONPATH=OTHER/src compiles another checkout's kernels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.machine import nvidia
from deltatune.ops.gated_delta import fused, fused_hopper
from deltatune.ops.kernels import cubin, launch, nvrtc
from deltatune.ops.kernels.launch import Launch
from sizes import Size

HEAD, DTYPES = 128, {mx.bfloat16: "bfloat16", mx.float32: "float32"}
TOLD = re.compile(r"registers|spill|Potential")


class Recorder:
    """Stands in for MLX's launches: writes their machine code and keeps their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: list[dict[str, Any]] = []
        self.given: dict[str, Any] = {}
        launch._machine = lambda: "cuda"  # type: ignore[assignment]
        cubin.architecture = lambda: "sm_90a"
        nvidia.generation = lambda: nvidia.HOPPER  # type: ignore[assignment]
        nvidia.limits = lambda: nvidia.H200  # type: ignore[assignment]
        nvrtc.compiled = compiled
        mx.fast.precompiled_cuda_kernel = self.launched

    def launched(self, **given: Any) -> list[mx.array]:
        self.given = given
        return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

    def run(self, kernel: Launch) -> dict[str, mx.array]:
        """Record a launch and return arrays of its outputs' shapes by name."""
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
                "scalars": list(self.given["scalars"]),
                "blocks": list(kernel.blocks),
                "threads": kernel.groups * 32,
                "bytes": kernel.bytes,
            }
        )
        return dict(zip(kernel.outputs, outputs, strict=True))


def compiled(text: str, name: str, architecture: str) -> bytes:
    code, report = nvrtc.compiled_with_report(text, name, architecture)
    for line in filter(TOLD.search, report.splitlines()):
        print(f"{name}: {line.strip()}", flush=True)
    return code


def record(size: Size, run: Callable[[Launch], dict[str, mx.array]]) -> None:
    """Run the four launches of a call of `size`."""
    shape = (size.batch, size.tokens, size.key_heads, size.value_heads, HEAD, HEAD)
    q, v = (mx.zeros((*shape[:2], heads, HEAD), mx.bfloat16) for heads in (size.key_heads, size.value_heads))
    gates, last = mx.zeros(v.shape[:3]), mx.zeros((size.batch, size.value_heads, HEAD, HEAD))
    x = fused.KernelInputs(q, q, v, gates, gates, fused.no_initial_state(), None, None)
    tiling = fused_hopper.choose_hopper_tiling(shape, mx.bfloat16, masked=False, segmented=False)
    assert tiling is not None, f"Hopper's kernels do not support {size}"
    prepared = run(fused_hopper.prepare(tiling, x))
    scanned = run(fused_hopper.scan(tiling, x, prepared))
    reversed_ = run(fused_hopper.reverse(tiling, x, prepared, v, last))
    saved = {"factors": prepared["factors"], "states": scanned["states"], "d_states": reversed_["d_states"]}
    saved |= {"u": scanned["u"], "d_right": reversed_["d_right"], "dy": v}
    run(fused_hopper.gradients(tiling, x, saved))


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", nargs="+", metavar="SIZE")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(options.folder)
    for text in options.sizes:
        recorder.plan = []
        record(Size.written(text), recorder.run)
        path = options.folder / f"{text.replace('/', '-')}.json"
        path.write_text(json.dumps({"size": Size.written(text).record(), "launches": recorder.plan}, indent=1))
        print(f"{text}: {path}", flush=True)


if __name__ == "__main__":
    main()
