"""Reads and sets the environment variables that control deltatune, MLX and CUDA."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

from ..errors import UserError
from ..options.values import nearest, short

BLAS = "DELTATUNE_BLAS"
THREADS = "DELTATUNE_THREADS"
CACHE = "DELTATUNE_CACHE"
# This is MLX's variable. Its default, 1, lets GPUs round the factors of fp32 products to 10 bits of mantissa: NVIDIA's,
# and Apple's from M5 on. Apple's matrix units compute fp32 products in no other way.
TF32 = "MLX_ENABLE_TF32"
# These are MLX's variables: the size of one piece of work for a GPU, in millions of elements read, although its name
# says megabytes, and in operations. Up to ten pieces wait in the queue, and each holds the buffers that it uses.
ELEMENTS, OPERATIONS = "MLX_MAX_MB_PER_BUFFER", "MLX_MAX_OPS_PER_BUFFER"
PIECE = {ELEMENTS: 800, OPERATIONS: 400}
# A command with --memory has smaller pieces, which hold less of its limit.
SMALL_PIECE = {ELEMENTS: 200, OPERATIONS: 100}
# These are MLX's variables: how many kinds of recorded pieces it keeps, each with some 6 MB of an NVIDIA GPU's memory,
# and whether it ends a process that has recorded twice as many. On a full GPU pieces end where memory does, so that a
# long run has more.
RECORDS, CHECKS_RECORDS = "MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_CACHE_THRASHING_CHECK"
FEW_RECORDS = 128
# MLX's own sizes on the largest Apple GPUs, where no variable is set.
METAL_PIECE = {ELEMENTS: 50, OPERATIONS: 50}
# This is CUDA's variable: the GPUs that a process may see.
GPUS = "CUDA_VISIBLE_DEVICES"
# This is OpenBLAS's variable, of which NumPy has a copy of its own.
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
# The rank of a process: mlx.launch counts over all machines, Open MPI's variable counts on one machine.
RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")

BLAS_CHOICES = ("openblas", "system")


def check(implementations: Mapping[str, tuple[str, ...]]) -> None:
    """Raise UserError if a variable of deltatune, or one of MLX's that it sets, has an unknown value.

    `implementations` has, by operator, the implementations that its variable may force.
    """
    for read in (blas, threads, cache_directory):
        read()
    for operator, names in implementations.items():
        implementation(operator, names)
    for name, least in ((TF32, 0), (ELEMENTS, 1), (OPERATIONS, 1), (RECORDS, 1), (CHECKS_RECORDS, 0)):
        value = os.environ.get(name, "1")
        # MLX takes the digits at the start of the value, so that it would read `true` as 0.
        if not re.fullmatch(r"\s*\+?\d{1,9}\s*", value) or int(value) < least:
            raise UserError(f"{name}={short(value)}: expected a whole number of {least} or more, or unset.")


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(name)
    if value is None or value == "":
        return None
    if value not in choices:
        raise UserError(
            f"{name}={short(value)}: expected one of {', '.join(choices)}, or unset{nearest(value, list(choices))}."
        )
    return value


def blas() -> str:
    """Return `openblas` (the default: give MLX OpenBLAS on Linux CPUs) or `system` (keep MLX's own BLAS)."""
    return _choice(BLAS, BLAS_CHOICES) or "openblas"


def threads() -> int | None:
    """Return the number of BLAS threads that DELTATUNE_THREADS forces, or None if machine/threads.py may choose."""
    value = os.environ.get(THREADS)
    if not value:
        return None
    if not re.fullmatch(r"[0-9]{1,4}", value) or int(value) < 1:
        raise UserError(f"{THREADS}={short(value)}: expected a number of threads from 1 to 9999, or unset.")
    return int(value)


def of_child() -> dict[str, str]:
    """Return the environment of a new process that imports packages from where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_directory() -> Path:
    """Return the folder of kernel verdicts and prepared libraries: DELTATUNE_CACHE, else the user's cache folder.

    UserError if DELTATUNE_CACHE is a file, or if it is not set and the user has no home.
    """
    value = os.environ.get(CACHE)
    if value:
        # Methods of Path raise where a folder on the way cannot be entered.
        if os.path.exists(value) and not os.path.isdir(value):
            raise UserError(f"{CACHE}={short(value)}: expected a folder, or a path where one can be made, or unset.")
        return Path(value)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if caches.startswith("~"):
        raise UserError(f"HOME is not set, and this user has no home folder: set HOME, or {CACHE} to a folder.")
    return Path(caches) / "deltatune"


def expanded(path: str | Path) -> Path:
    """Return a path with `~` as the user's home; `~NAME` stays where there is no such user, for which Path raises."""
    return Path(os.path.expanduser(path))


def variable(operator: str) -> str:
    """Return the variable that forces an implementation of an operator: DELTATUNE_ATTENTION for `attention`."""
    return f"DELTATUNE_{operator.upper()}"


def implementation(operator: str, names: tuple[str, ...]) -> str | None:
    """Return which of the implementations `names` of an operator the user forces, or None for the automatic choice."""
    return _choice(variable(operator), names)


def keep_full_fp32() -> None:
    """Make MLX multiply fp32 matrices in full fp32 on every GPU, unless the user has set the variable.

    MLX reads the variable at its first matrix product.
    """
    os.environ.setdefault(TF32, "0")


def limit_queue() -> None:
    """Choose the size of the pieces in which MLX hands work to NVIDIA GPUs, unless the user has set the variables.

    MLX reads them at its first evaluation, and its own sizes differ from GPU to GPU. Launching a piece takes a CPU 70
    us; the memory of waiting pieces is bounded by the plan of a run (plan/device_limits.py).
    """
    if sys.platform == "linux":
        for name, size in (SMALL_PIECE if _bounds_memory(sys.argv[1:]) else PIECE).items():
            os.environ.setdefault(name, str(size))
        os.environ.setdefault(CHECKS_RECORDS, "0")


def keep_few_records() -> None:
    """Make MLX keep few kinds of recorded pieces, unless the user has set the variable.

    MLX reads it at its first evaluation on a GPU, and keeps 400 by itself.
    """
    os.environ.setdefault(RECORDS, str(FEW_RECORDS))


def _bounds_memory(arguments: list[str]) -> bool:
    """Whether a command bounds its memory, by --memory or in the file that -c or --config names."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, _, value = argument.partition("=")
        if name == "--memory":
            return True
        if name in ("-c", "--config"):
            file = Path(value or following)
            with contextlib.suppress(OSError, ValueError):
                # A pipe can be read only once.
                if file.is_file() and re.search(r"\bmemory[\"']?\s*:", file.read_text(encoding="utf-8")):
                    return True
    return False


def queued() -> dict[str, int]:
    """Return the most that a piece of work for an NVIDIA GPU has, by the variables' names, as in PIECE."""
    return {name: _leading_number(name, size) for name, size in PIECE.items()}


def queued_on_metal() -> dict[str, int]:
    """Return the same for an Apple GPU. On Linux, where a plan for one may be made, the variables are NVIDIA's."""
    read = sys.platform == "darwin"
    return {name: _leading_number(name, size) if read else size for name, size in METAL_PIECE.items()}


def _leading_number(name: str, otherwise: int) -> int:
    """The number that a variable's value begins with; 0 for none. MLX reads variables by atoi."""
    digits = re.match(r"\s*([+-]?\d+)", os.environ.get(name, str(otherwise)))
    return int(digits[1]) if digits else 0


def see_own_gpu() -> None:
    """Give each process of a launched run one NVIDIA GPU of its own, in the order of ranks.

    mlx.launch does this itself for NCCL. Over the ring and MPI, all processes would compute on the first GPU, and two
    H200s would train no faster than one (docs/decisions/several-gpus.md). CUDA reads the variable when MLX is first
    used.
    """
    rank = _rank()
    visible = os.environ.get(GPUS)
    gpus = visible.split(",") if visible is not None else [str(number) for number in range(_nvidia_gpus())]
    if rank is not None and len(gpus) > 1:
        os.environ[GPUS] = gpus[int(rank) % len(gpus)]


def keep_numpy_in_one_thread() -> None:
    """Let NumPy's OpenBLAS, which is loaded later, multiply in the thread that asks, in a process of a launched run.

    Ranks with a thread for each core wait for one another's time slices, on a busy machine for ever.
    """
    if _rank() is not None:
        os.environ.setdefault(NUMPY_THREADS, "1")


def _rank() -> str | None:
    return next((value for name in RANKS if (value := os.environ.get(name, "")).isdigit()), None)


def _nvidia_gpus() -> int:
    """Count the NVIDIA GPUs of this Linux machine or container, without starting CUDA: it would read GPUS at once."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def launched_addresses() -> list[str]:
    """Return the addresses of this process in the host file of mlx.launch's ring; empty without such a file."""
    hosts, rank = os.environ.get("MLX_HOSTFILE"), os.environ.get(RANKS[0])
    text = Path(hosts).read_text(encoding="utf-8").strip() if hosts and rank else ""
    return [address.rsplit(":", 1)[0] for address in json.loads(text)[int(rank)]] if text and rank else []


def launched_host() -> str | None:
    """Return mlx.launch's address of rank 0 for NCCL, which every machine of the run can reach."""
    return os.environ.get("NCCL_HOST_IP")


def tf32() -> bool:
    """Tell whether MLX may round the factors of fp32 products on GPUs."""
    return _leading_number(TF32, 1) != 0
