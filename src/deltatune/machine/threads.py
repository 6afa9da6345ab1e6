"""Chooses the number of BLAS threads: one for each core that this process may use, or fewer if more are no faster.

OpenBLAS's threads wait for one another by spinning, several times in every product. If another program keeps one of
their cores busy, all of them wait for its time slices: two threads on two busy cores did a tenth of the work of one.
The number is chosen once, at the start, because the last bits of a product depend on it.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import environment

# A number of threads is accepted if it is at least this many times as fast as half the number.
GAIN = 1.1
# A trial of a number runs at least so many products and so many seconds, unless the time limit ends it (seconds).
_PRODUCTS, _TRIAL_SECONDS, _TIME_LIMIT = 5, 0.03, 0.15
# The number of ranks on this host, as set by mpirun of Open MPI, and of MPICH and Intel MPI.
_MPI_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Threads:
    """A number of BLAS threads, and the reason for it in words."""

    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.number} thread{'s' * (self.number != 1)} ({self.why})"


def choose(seconds: Callable[[int], float]) -> Threads:
    """Choose the number of BLAS threads by `seconds`, which times one matrix product with a number of threads.

    DELTATUNE_THREADS forces a number. Otherwise the choice starts at this process's share of the cores, and halves it
    while half as many threads are about as fast.
    """
    forced = environment.threads()
    if forced is not None:
        return Threads(forced, f"{environment.THREADS}={forced}")
    shared = share()
    number = shared.number
    while number > 1:
        gain = _gain(seconds, number)
        if gain >= GAIN:
            break
        number //= 2
    if number == shared.number:
        return shared
    return Threads(
        number,
        "more were no faster when tried at the start: cores are busy, or two threads share one; "
        f"{environment.THREADS}=N forces a number",
    )


def _gain(seconds: Callable[[int], float], number: int) -> float:
    """Measure how many times as fast `number` threads are as half the number, taking turns.

    The times are summed, and no minimum is taken: too many threads cost rare long waits.
    """
    half = number // 2
    seconds(number), seconds(half)
    seconds_full = seconds_half = 0.0
    products = 0
    while products < _PRODUCTS or max(seconds_full, seconds_half) < _TRIAL_SECONDS:
        seconds_full += seconds(number)
        seconds_half += seconds(half)
        products += 1
        if seconds_full + seconds_half > 2 * _TIME_LIMIT:
            break
    return seconds_half / seconds_full


def share() -> Threads:
    """Return this process's share of the cores: the lower of cores and container quota, divided by the ranks here."""
    cores = environment.cores()
    number, why = cores, f"one for each of {cores} cores" if cores > 1 else "one core"
    granted = quota()
    if granted is not None and granted < cores:
        number = max(1, int(granted))
        why = f"the container's quota is {granted:g} of {cores} cores"
    ranks = ranks_here()
    if ranks > 1:
        number = max(1, number // ranks)
        why += f", shared by {ranks} ranks"
    return Threads(number, why)


def ranks_here() -> int:
    """Count the ranks of this distributed run on this host, as mpirun or the host file of mlx.launch says; else 1."""
    for name in _MPI_RANKS:
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    hosts, rank = os.environ.get("MLX_HOSTFILE"), os.environ.get("MLX_RANK", "")
    if not hosts or not rank.isdigit():
        return 1
    try:
        # The file holds a list for each rank, with its addresses as host:port.
        entries = json.loads(Path(hosts).read_text())
        addresses = [{address.rsplit(":", 1)[0] for address in entry} for entry in entries]
        this_host = addresses[int(rank)]
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        return 1  # MLX reads the same file and reports its faults.
    return sum(bool(this_host & others) for others in addresses)


def quota(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return how many cores the control groups grant this process; None if they set no limit.

    A container's CPU limit is such a limit. It may be a fraction of a core.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [_read_v2(folder / "cpu.max") for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            limits += [_read_v1(folder) for base in (controllers, "cpu") for folder in _upwards(root / base, path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """Return the folders of a control group and of its ancestors; in a container only `root` may exist."""
    below = Path(path.lstrip("/"))
    return [root / below, *(root / parent for parent in below.parents)]


def _read_v2(file: Path) -> float | None:
    try:
        granted, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if granted == "max" else int(granted) / int(period)


def _read_v1(folder: Path) -> float | None:
    try:
        granted, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return granted / period if granted > 0 else None


def product(library: ctypes.CDLL, most: int) -> Callable[[int], float]:
    """Return a function that multiplies two fp32 matrices with a number of threads and returns the seconds it took.

    The matrices grow with `most`, the largest number that will be tried: 384 x 384 for two. `library` is OpenBLAS,
    without the prefix of its symbols.
    """
    side = 64 * round(5 * most ** (1 / 3))
    matrices = [(ctypes.c_float * (side * side))() for _ in range(3)]
    number, one, size = ctypes.c_int, ctypes.c_float(1.0), ctypes.c_int(side)
    order, plain = number(101), number(111)  # In CBLAS: row-major, not transposed.
    a, b, c = matrices

    def seconds(threads: int) -> float:
        library.openblas_set_num_threads(threads)
        started = time.perf_counter()
        library.cblas_sgemm(order, plain, plain, size, size, size, one, a, size, b, size, ctypes.c_float(0.0), c, size)
        return time.perf_counter() - started

    return seconds
