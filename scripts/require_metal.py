#!/usr/bin/env python3
"""Fail where MLX does not compute on an Apple GPU, so that a job that tests Metal cannot pass without one.

usage: scripts/require_metal.py      exit code 1, with what is missing, where there is no Metal
"""

from __future__ import annotations

import os
import sys

import deltatune  # noqa: F401  (first, as everywhere)

# isort: split
import mlx.core as mx

_SOURCE = "uint i = thread_position_in_grid.x; y[i] = 2.0f * x[i] + 1.0f;"


def doubled() -> list[float]:
    """The result of a kernel compiled here for 0, 1 and 2, which should be 1, 3 and 5."""
    kernel = mx.fast.metal_kernel(name="doubled", input_names=["x"], output_names=["y"], source=_SOURCE)
    (y,) = kernel(
        inputs=[mx.arange(3).astype(mx.float32)],
        output_shapes=[(3,)],
        output_dtypes=[mx.float32],
        grid=(3, 1, 1),
        threadgroup=(3, 1, 1),
    )
    return y.tolist()


def main() -> int:
    """The exit code: 0 on an Apple GPU that runs a kernel, else 1."""
    if not mx.metal.is_available():
        print(f"Metal is not available to mlx {mx.__version__} here: expected an Apple GPU.", file=sys.stderr)
        return 1
    if mx.default_device() != mx.Device(mx.gpu):
        print(f"MLX computes on {mx.default_device()}: expected the GPU.", file=sys.stderr)
        return 1
    found = doubled()
    if found != [1.0, 3.0, 5.0]:
        print(f"A kernel that doubles and adds one gave {found} for 0, 1, 2: expected 1, 3, 5.", file=sys.stderr)
        return 1
    layers = [name for name in os.environ if name.startswith(("MTL_", "METAL_"))]
    print(f"Metal: {mx.device_info()}; a kernel ran; validation layers: {', '.join(layers) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
