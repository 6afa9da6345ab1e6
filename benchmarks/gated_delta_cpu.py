"""Times the gated delta rule on a CPU, forward and backward, beside all other installed implementations.

usage: DELTATUNE_THREADS=2 python benchmarks/gated_delta_cpu.py [--rounds 7] [--tokens 2048] [--only NAME ...]

Each implementation has a process of its own; rounds are interleaved, so that other load on the machine affects all of
them, and medians are printed in one table. An implementation whose outputs or gradients on the first tokens differ from
a float64 recurrence gets no time. The column CPU is the time of all threads together, forward and backward. Waiting
BLAS threads spin and count as well, but on a busy machine it is more reliable than the clock. Peaks are MLX's own
count beyond the inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

import processes
from machine import heading
from registry import on
from sizes import CPU, inputs
from tables import cpu_table
from verify import AGREES, errors

ENTRIES = on("cpu")


def work(name: str, tokens: int) -> None:
    """The process of one implementation, which prints its error, then answers each line that it reads with a time."""
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    size = replace(CPU, tokens=tokens)
    implementation = ENTRIES[name].make()
    error = errors(implementation, size).worst[1]
    implementation.load(inputs(size))
    print(json.dumps(error), flush=True)
    for line in sys.stdin:
        start, used = time.perf_counter(), time.process_time()
        getattr(implementation, line.strip())()
        times = time.perf_counter() - start, time.process_time() - used
        print(json.dumps([*times, implementation.peak]), flush=True)


class Worker:
    """The process of one implementation, its error, and its times in seconds."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        self.lines = processes.LineProcess(name, [__file__, "--work", name, "--tokens", str(tokens)])
        self.error: float = self.lines.first
        self.times: dict[str, list[float]] = {"forward": [], "backward": [], "backward, CPU": []}
        self.peak: float | None = None

    def run(self, what: str, keep: bool) -> None:
        seconds, used, peak = self.lines.ask(what)
        if keep:
            self.times[what].append(seconds)
        if keep and what == "backward":
            self.times["backward, CPU"].append(used)
            self.peak = peak

    def agrees(self) -> bool:
        return self.error <= AGREES[CPU.dtype]


def measure(names: list[str], tokens: int, rounds: int) -> list[Worker]:
    workers = [Worker(name, tokens) for name in names]
    ready = [worker for worker in workers if worker.agrees()]
    for number in range(rounds + 1):
        for worker in ready:
            if ENTRIES[worker.name].slow and number not in (1, rounds):
                continue
            for what in ("forward", "backward"):
                worker.run(what, keep=number > 0)
    for worker in workers:
        worker.lines.process.communicate()
    return workers


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.tokens)
        return
    workers = measure(options.only, options.tokens, options.rounds)
    print(f"gated delta, {replace(CPU, tokens=options.tokens)}, median of {options.rounds} interleaved rounds")
    print(f"(two for the slow ones). {heading()}.\n")
    print(cpu_table(workers))


if __name__ == "__main__":
    main()
