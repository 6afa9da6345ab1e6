"""Lets other processes build, on an NVIDIA GPU, those kernels of MLX's own that the doctor's cases run.

MLX builds each of them at its first use, one after another, and stores them for all processes of the machine. On a
machine that has never run MLX this takes ten seconds, in which the doctor's own process can import packages.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from ..machine import backend, environment
from . import implementations, probes

# The function that each process runs; its results are dropped.
_CASES = {"definitions": implementations.compare_with_definitions, "faults": probes.faults}


def build(builders: ThreadPoolExecutor) -> None:
    """Let `builders` start the processes and wait for them, where MLX has kernels to build."""
    if not backend.builds_kernels():
        return
    variables = environment.of_child()
    for name in _CASES:
        builders.submit(subprocess.run, [sys.executable, "-m", __name__, name], env=variables, capture_output=True)


if __name__ == "__main__":
    _CASES[sys.argv[1]]()
