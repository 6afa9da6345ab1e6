"""Runs `deltatune train`, and prints after each iteration its time, MLX's peak and what it waited for weights.

It also prints MLX's and the driver's counts, after each sampling of answers, too.

usage: python benchmarks/observed_training.py [--from disk] [--all-on-disk] [--try] train --model DIR --data DIR ...

--from says where the weights come from that do not stay in the device's memory, whatever would be chosen: the disk,
past the system's page cache; the page cache; or arrays in the host's memory, which a GPU copies. --try runs what the
plan refuses, too, with no layer's weights in memory: what is planned is more than what is counted, for some shapes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.cli import main as command_line
from deltatune.machine import nvidia
from deltatune.machine.disk import PageCache
from deltatune.plan import placement
from deltatune.train.by_layer import store
from deltatune.train.by_layer.store import Store
from deltatune.train.reports.reporting import Reporting
from deltatune.train.rollouts.answer_sampler import AnswerSampler
from machine import gpu

# CUmemPool_attribute of CUDA's cuda.h: the memory that the pool has of the card, and the part of it in use.
RESERVED, USED = 5, 7
SOURCES = ("plan", "disk", "cache", "host")


def replacements(source: str, all_on_disk: bool, tried: bool) -> list[tuple[Any, str, Any]]:
    """What is replaced so that weights come from `source`, and so that no layer stays in memory."""
    found: list[tuple[Any, str, Any]] = []
    choose, refused = placement.left_on_disk, 0

    def left_on_disk(peak: int, sizes: Sequence[int], memory: int, **least: int) -> tuple[int, ...] | None:
        nonlocal refused
        chosen = tuple(range(len(sizes))) if all_on_disk else choose(peak, sizes, memory, **least)
        refused += chosen is None
        # The first refusal is answered by a plan with the inputs of layers in files.
        return tuple(range(len(sizes))) if refused > 1 else chosen

    if all_on_disk or tried:
        found.append((placement, "left_on_disk", left_on_disk))
    if source != "plan":
        found.append((placement, "fits_on_host", lambda _: source == "host"))
    if source in ("disk", "cache"):
        found += [(module, "cached", lambda _: source == "cache") for module in (placement, store)]
    if source == "cache":
        found.append((PageCache, "drop", lambda _: None))
    return found


class DriverCounts:
    """Looks often, in a thread, at what MLX's pool of memory holds, and keeps the moment of the most."""

    def __init__(self) -> None:
        driver, pool = nvidia.library(["libcuda.so.1"]), ctypes.c_void_p()
        assert driver is not None
        if driver.cuInit(0) or driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0):
            raise SystemExit("NVIDIA's driver names no pool of memory.")
        self._driver: Any = driver
        self._pool, self._most = pool, (0, 0, 0, 0)
        self._at_first = self._free = nvidia.free_memory() or 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _attribute(self, kind: int) -> int:
        value = ctypes.c_uint64()
        self._driver.cuMemPoolGetAttribute(self._pool, ctypes.c_int(kind), ctypes.byref(value))
        return value.value

    def _watch(self) -> None:
        while True:
            time.sleep(0.01)
            seen = self._attribute(RESERVED), self._attribute(USED), mx.get_active_memory(), mx.get_cache_memory()
            self._most = max(self._most, seen)
            self._free = min(self._free, nvidia.free_memory() or 0)

    def said(self) -> str:
        """Return the counts at the moment of the most since the last call, in GB.

        `taken` is the most that the card's free memory has fallen, contexts included.
        """
        (reserved, used, active, cached), self._most = self._most, (0, 0, 0, 0)
        taken, self._free = self._at_first - self._free, nvidia.free_memory() or 0
        parts = {"pool": reserved, "handed out": used, "MLX active": active, "MLX cache": cached, "taken": taken}
        return ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())


class Observed:
    """Prints each iteration of a run."""

    def __init__(self) -> None:
        self._weights: Store | None = None
        self._waited, self._read, self._count = 0.0, 0, 0
        self._counts = DriverCounts() if gpu() is not None else None

    def reading(self, made: Callable[..., None]) -> Callable[..., None]:
        """Store.place, whose store is kept."""

        def wrapped(weights: Store, *given: Any, **options: Any) -> None:
            made(weights, *given, **options)
            self._weights = weights

        return wrapped

    def iteration(self, counted: Callable[..., None]) -> Callable[..., None]:
        """Reporting.iteration, which also prints."""

        def wrapped(reporting: Reporting, progress: Any, seconds: float, tokens: int, loss: float | None) -> None:
            counted(reporting, progress, seconds, tokens, loss)
            self._count += 1
            line = f"step {self._count}: {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"
            line += f", peak {reporting.peak_memory:.2f} GB, loss {'none' if loss is None else format(loss, '.6f')}"
            if self._weights is not None:
                disk = self._weights.disk
                waited, read = disk.waited - self._waited, disk.read - self._read
                self._waited, self._read = disk.waited, disk.read
                line += f", waited {waited:.2f} s ({waited / seconds:.0%}), read {read / 1e9:.2f} GB"
                line += f" ({read / seconds / 1e9:.2f} GB a second of the step)"
            print(line, flush=True)
            self._say_counts("memory")

        return wrapped

    def sampling(self, sampled: Callable[..., Any]) -> Callable[..., Any]:
        """AnswerSampler.__call__, which also prints."""

        def wrapped(*given: Any) -> Any:
            answers = sampled(*given)
            self._say_counts("sampled")
            return answers

        return wrapped

    def _say_counts(self, name: str) -> None:
        seen = f"MLX's peak {mx.get_peak_memory() / 1e9:.2f}"
        if self._counts is not None:
            seen = f"{self._counts.said()}, {seen}"
        print(f"{name}: {seen} GB", flush=True)


def main() -> int:
    parser = processes.parser(__doc__)
    parser.add_argument("--from", dest="source", choices=SOURCES, default="plan")
    parser.add_argument("--all-on-disk", action="store_true", help="no layer stays in memory, whatever is planned")
    parser.add_argument("--try", dest="tried", action="store_true", help="what the plan refuses, too")
    options, arguments = parser.parse_known_args()
    observed = Observed()
    with ExitStack() as stack:
        for target, name, value in replacements(options.source, options.all_on_disk, options.tried):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.object(Store, "place", observed.reading(Store.place)))
        stack.enter_context(patch.object(Reporting, "iteration", observed.iteration(Reporting.iteration)))
        stack.enter_context(patch.object(AnswerSampler, "__call__", observed.sampling(AnswerSampler.__call__)))
        return command_line(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
