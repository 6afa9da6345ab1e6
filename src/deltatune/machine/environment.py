"""Every environment variable that deltatune reads, in one place."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

BLAS = "DELTATUNE_BLAS"
THREADS = "DELTATUNE_THREADS"
CACHE = "DELTATUNE_CACHE"
GATED_DELTA = "DELTATUNE_GATED_DELTA"
ATTENTION = "DELTATUNE_ATTENTION"
# MLX's own: 1, its default, lets NVIDIA GPUs round fp32 factors to 10 bits of mantissa.
TF32 = "MLX_ENABLE_TF32"
# MLX's own: how much is queued for a GPU as one piece of work, in millions of elements read, whatever its name says.
# Ten pieces may wait, and hold what they use.
QUEUE, QUEUED = "MLX_MAX_MB_PER_BUFFER", 200
# CUDA's own: the GPUs that a process may see.
GPUS = "CUDA_VISIBLE_DEVICES"
# The number of a process: mlx.launch's, over all machines, and Open MPI's, on its own machine.
RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")

BLAS_CHOICES = ("openblas", "system")
GATED_DELTA_CHOICES = ("naive", "chunk", "fused", "native")
ATTENTION_CHOICES = ("naive", "blocked", "fused", "native")


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(name)
    if value is None or value == "":
        return None
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known: expected one of {', '.join(choices)}, or unset.")
    return value


def blas() -> str:
    """`openblas` (default): give MLX OpenBLAS on Linux CPUs. `system`: leave MLX's own BLAS alone."""
    return _choice(BLAS, BLAS_CHOICES) or "openblas"


def threads() -> int | None:
    """The number of BLAS threads that DELTATUNE_THREADS forces, or None for the choice of threads.py."""
    value = os.environ.get(THREADS)
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{THREADS}={value!r}: expected a whole number of threads, 1 or more.")
    return int(value)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_directory() -> Path:
    """Where verdicts and prepared libraries are kept: DELTATUNE_CACHE, else the user's cache folder."""
    value = os.environ.get(CACHE)
    if value:
        return Path(value)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltatune"


def gated_delta() -> str | None:
    """The forced implementation of gated_delta, or None for the automatic choice."""
    return _choice(GATED_DELTA, GATED_DELTA_CHOICES)


def attention() -> str | None:
    """The forced implementation of attention, or None for the automatic choice."""
    return _choice(ATTENTION, ATTENTION_CHOICES)


def keep_full_fp32() -> None:
    """Have MLX multiply fp32 in fp32 on NVIDIA GPUs, unless the user has chosen. MLX reads it at its first product."""
    os.environ.setdefault(TF32, "0")


def queue_little() -> None:
    """Have MLX hand work to NVIDIA GPUs in pieces of 200 million elements, unless the user chose; its own are to 1,000.

    On an H200 a checkpointed step took 8 % less time so, and less than half the memory (docs/log.md).
    """
    if sys.platform == "linux":
        os.environ.setdefault(QUEUE, str(QUEUED))


def see_own_gpu() -> None:
    """Have each process of a launched run see one NVIDIA GPU alone, in turn. CUDA reads it when MLX is first used.

    mlx.launch does so itself for NCCL. Over the ring and MPI all processes would compute on the first GPU, so that two
    H200s train no faster than one (docs/log.md).
    """
    rank = next((value for name in RANKS if (value := os.environ.get(name, "")).isdigit()), None)
    visible = os.environ.get(GPUS)
    found = visible.split(",") if visible is not None else [str(number) for number in range(_nvidia_gpus())]
    if rank is not None and len(found) > 1:
        os.environ[GPUS] = found[int(rank) % len(found)]


def _nvidia_gpus() -> int:
    """How many NVIDIA GPUs this Linux machine or container has, without starting CUDA, which would fix its choice."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def launched_addresses() -> list[str]:
    """The addresses at which mlx.launch's ring says that other machines reach this process."""
    hosts, rank = os.environ.get("MLX_HOSTFILE"), os.environ.get(RANKS[0])
    text = Path(hosts).read_text(encoding="utf-8").strip() if hosts and rank else ""
    return [place.rsplit(":", 1)[0] for place in json.loads(text)[int(rank)]] if text and rank else []


def launched_host() -> str | None:
    """The address of rank 0 under mlx.launch's NCCL, which every machine of the run can reach."""
    return os.environ.get("NCCL_HOST_IP")


def tf32() -> bool:
    """Whether MLX may round the factors of fp32 products on NVIDIA GPUs: read as MLX reads it, with atoi."""
    number = re.match(r"\s*[+-]?\d+", os.environ.get(TF32, "1"))
    return number is not None and int(number[0]) != 0
