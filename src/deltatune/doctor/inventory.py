"""Lists the chip, system, device and BLAS of this machine, and measures how fast the BLAS is."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from ..machine import backend, blas, blas_fault, environment
from ..ops.operator import verdicts
from ..ops.products.quantized_product import dense_product
from ..upstream import libmlx

_SIDE = 768
_TIMES = 4
_SECONDS = 0.5


def machine() -> dict[str, str]:
    """Facts about this machine by name, in the order in which they are shown."""
    about = verdicts.machine()
    cores = environment.cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts = {"chip": f"{_chip()}, {cores} core{'s' * (cores != 1)}", "memory": f"{memory / 2**30:.1f} GiB"}
    facts["system"] = f"{_system()}, Python {platform.python_version()}"
    here = about["backend"]
    facts["device"] = here if here == "cpu" else f"{here}: {about['device']} {about['driver']}".rstrip()
    facts["BLAS"] = str(blas.status())
    facts["BLAS file"] = blas_fault.probe().library or "not found"
    facts["BLAS speed"] = f"{speed():,.1f} GFLOP/s on fp32 matrices of {_SIDE} x {_SIDE}"
    facts["fp32"] = _fp32(here)
    if backend.computes_in_fp32():
        facts["bf16"] = f"products through fp32, {speed(dense_product, mx.bfloat16):,.1f} GFLOP/s on the same sizes"
    return facts


def speed(product: Callable[[mx.array, mx.array], mx.array] = mx.matmul, dtype: mx.Dtype = mx.float32) -> float:
    """The speed of a product on the CPU in GFLOP/s: the best of up to four runs within half a second."""
    a = mx.random.normal((_SIDE, _SIDE), dtype, key=mx.random.key(0), stream=mx.cpu)
    mx.eval(a)
    best = float("inf")
    begun = time.perf_counter()
    for _ in range(_TIMES):
        start = time.perf_counter()
        with mx.stream(mx.cpu):
            mx.eval(product(a, a))
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - begun > _SECONDS:
            break
    return 2 * _SIDE**3 / best / 1e9


def mlx_build() -> str:
    """Whether MLX's Metal library holds kernels for the matrix units of an M5 and later, which MLX calls NAX."""
    kernels = library.with_name("mlx.metallib") if (library := libmlx()) else None
    if kernels is None or not kernels.is_file():
        return "no Metal library"
    return "NAX kernels" if b"_nax" in kernels.read_bytes() else "no NAX kernels"


def thermal_state() -> str:
    """How hot the machine is, as its system says: the lines of macOS's pmset, or the hottest zone that Linux names."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/bin/pmset", "-g", "therm"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    with contextlib.suppress(OSError, ValueError):
        zones = [int(file.read_text()) for file in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
        return f"{max(zones) / 1e3:.0f} degrees Celsius"
    return "not known"


def _fp32(device: str) -> str:
    if device == "cpu":
        return "products in full fp32"
    if environment.tf32():
        where = " on the matrix units of an M5 and later" if device == "metal" else ""
        return f"products in TF32, 10 bits of mantissa{where}: {environment.TF32}=1 is set"
    return f"products in full fp32 ({environment.TF32}=0)"


def _chip() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return str(mx.device_info().get("device_name", platform.processor()))
    return platform.processor() or platform.machine()


def _system() -> str:
    name = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"
    return f"{name} {platform.machine()}"
