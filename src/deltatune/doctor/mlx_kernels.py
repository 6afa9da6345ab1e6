"""Lets another process build, on an NVIDIA GPU, those kernels of MLX's own that the doctor's cases run.

MLX builds each of them at its first use, one after another, and stores them for all processes of the machine. On a
machine that has never run MLX this takes ten seconds, in which the doctor's own process can import packages.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ..machine import backend
from . import implementations, probes


def build() -> None:
    """Run the cases in another process, where MLX has kernels to build. Their results are not looked at."""
    if backend.device() == "cuda":
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([sys.executable, "-m", __name__], env=environment, capture_output=True)


if __name__ == "__main__":
    implementations.of_chunk()
    probes.faults()
