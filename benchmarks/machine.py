"""Names the date, the processors and the package versions with which a figure was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("mlx", "mlx-cuda-13", "mlx-lm", "mlx-vlm", "scipy-openblas32", "torch", "triton", "fla-core")
PACKAGES += ("flash-qla", "tilelang", "apache-tvm-ffi", "transformers", "peft")


def cpu() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    forced = os.environ.get("DELTATUNE_THREADS")
    return f"{name}, {os.cpu_count()} cores" + (f", {forced} threads" if forced else "")


def gpu() -> str | None:
    """The name of the NVIDIA GPU and its driver, or None."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.splitlines()[0].replace(", ", ", driver ")


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def heading() -> str:
    """The line over a table: the date, the GPU or the CPU, and the versions."""
    return f"{date.today()}, {gpu() or cpu()}; {versions()}"


def gpu_bytes() -> float:
    """The bytes of the GPU's memory; without a GPU, the bytes of main memory that a trial of the programs may use."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 4e9
    return float(found.splitlines()[0]) * 2**20
