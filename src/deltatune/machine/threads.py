"""How many threads the BLAS gets: cores that this process really has, and no more than pay.

OpenBLAS's threads wait for one another by spinning, several times in every product. Where another program keeps one of
their cores busy, all of them wait for its time slices: two threads on two busy cores did a tenth of what one did. The
number cannot follow the load later on, because the last bits of a product depend on it.
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

# A larger number of threads must be so many times as fast as half of it.
GAIN = 1.1
# Of each number in a trial: at least so many products, and so many seconds; but never more seconds than the last.
_PRODUCTS, _ENOUGH, _MOST = 5, 0.03, 0.15
# mpirun of Open MPI, and of MPICH and Intel MPI: processes on this host.
_MPI_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Threads:
    """A number of BLAS threads, and why it was chosen."""

    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.number} thread{'s' * (self.number != 1)} ({self.why})"


def choose(seconds: Callable[[int], float]) -> Threads:
    """DELTATUNE_THREADS, else this process's share of the cores, halved as long as half as many are as fast.

    seconds: how long one matrix product takes with so many threads, on this machine as busy as it is now.
    """
    forced = environment.threads()
    if forced is not None:
        return Threads(forced, f"{environment.THREADS}={forced}")
    most = share()
    number = most.number
    while number > 1:
        gain = _gain(seconds, number)
        if gain >= GAIN:
            break
        number //= 2
    if number == most.number:
        return most
    return Threads(
        number,
        "more were no faster when tried at the start: cores are busy, or two threads share one; "
        f"{environment.THREADS}=N forces a number",
    )


def _gain(seconds: Callable[[int], float], number: int) -> float:
    """How many times as fast `number` threads are as half of it, in turns. Sums, since what is rare must count too."""
    half = number // 2
    seconds(number), seconds(half)
    many = few = 0.0
    done = 0
    while done < _PRODUCTS or max(many, few) < _ENOUGH:
        many += seconds(number)
        few += seconds(half)
        done += 1
        if many + few > 2 * _MOST:
            break
    return few / many


def share() -> Threads:
    """The cores that this process may use, less what a container grants, divided by the ranks on this host."""
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
    """Processes of this distributed run on this host: mpirun's, or those that mlx.launch lists at our address."""
    for name in _MPI_RANKS:
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    hosts, rank = os.environ.get("MLX_HOSTFILE"), os.environ.get("MLX_RANK", "")
    if not hosts or not rank.isdigit():
        return 1
    try:
        # A list for each rank, of its addresses as host:port.
        listed = [{address.rsplit(":", 1)[0] for address in each} for each in json.loads(Path(hosts).read_text())]
        here = listed[int(rank)]
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        return 1  # MLX reads the same file, and says what is wrong with it.
    return sum(bool(here & addresses) for addresses in listed)


def quota(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that control groups grant this process, which a container's limit sets; None where nothing limits them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [_read_v2(folder / "cpu.max") for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            found += [_read_v1(folder) for base in (controllers, "cpu") for folder in _upwards(root / base, path)]
    limits = [limit for limit in found if limit is not None]
    return min(limits, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a control group and of all around it; in a container only `root` may be there."""
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
    """A function that multiplies two fp32 matrices with a number of threads and returns the seconds that it took.

    The matrices grow with the cores, 384 x 384 for two, so that each thread has as much to do.
    """
    side = 64 * round(5 * most ** (1 / 3))
    matrices = [(ctypes.c_float * (side * side))() for _ in range(3)]
    number, one, size = ctypes.c_int, ctypes.c_float(1.0), ctypes.c_int(side)
    order, plain = number(101), number(111)  # CBLAS: rows first, not transposed.
    a, b, c = matrices

    def seconds(threads: int) -> float:
        library.openblas_set_num_threads(threads)
        started = time.perf_counter()
        library.cblas_sgemm(order, plain, plain, size, size, size, one, a, size, b, size, ctypes.c_float(0.0), c, size)
        return time.perf_counter() - started

    return seconds
