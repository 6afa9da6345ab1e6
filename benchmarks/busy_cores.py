"""Measures how fast the demo's model trains on idle and on busy cores, by the number of BLAS threads.

usage: python benchmarks/busy_cores.py --rounds 3

Each figure is the median over rounds of a training run in a new process. deltatune chooses the threads, or
DELTATUNE_THREADS forces one or as many as there are cores. Busy cores run one spinning program each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WARM, MOST = 4, 60


class _EnoughError(Exception):
    """Ends a run that has been timed long enough."""


def train(seconds: float) -> dict[str, object]:
    """Train for this many seconds after the first iterations; returns iterations a second and the threads."""
    from deltatune.demo import flow, task
    from deltatune.demo.assets import MODEL
    from deltatune.machine import blas
    from deltatune.train import Trainer
    from deltatune.train.reports.screen import Screen
    from deltatune.train.setup import ready

    ends: list[float] = []

    class Clock(Screen):
        def say(self, text: str) -> None:
            pass

        def advance(self, done: int, note: str) -> None:
            ends.append(time.perf_counter())
            if len(ends) >= WARM + MOST or (len(ends) > WARM + 2 and ends[-1] - ends[WARM] > seconds):
                raise _EnoughError

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        task.write(output / "data", test=8)
        config = dataclasses.replace(flow.options(MODEL, output, 1000, (5e-3, 2e-4)), val_batches=0)
        run = ready(config)
        run.prepare()
        trainer = Trainer.of(run, Clock())
        with suppress(_EnoughError):
            trainer.run()
    rate = (len(ends) - 1 - WARM) / (ends[-1] - ends[WARM])
    return {"rate": rate, "threads": str(blas.status().threads)}


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Within it, `count` programs keep one core busy each."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(threads: int | None, seconds: float) -> dict[str, object]:
    env = {name: value for name, value in os.environ.items() if name != "DELTATUNE_THREADS"}
    if threads is not None:
        env["DELTATUNE_THREADS"] = str(threads)
    command = [sys.executable, __file__, "--child", str(seconds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.child)))
        return
    cores = len(os.sched_getaffinity(0))
    for busy in (0, cores):
        print(f"{busy} of {cores} cores busy with other programs; load average before: {os.getloadavg()[0]:.1f}")
        with spinning(busy):
            rounds = [[measure(number, options.seconds) for number in (None, 1, cores)] for _ in range(options.rounds)]
        for number, found in zip(("chosen", "one", "all"), zip(*rounds, strict=True), strict=True):
            rates = [each["rate"] for each in found]
            threads = " | ".join(sorted({str(each["threads"]) for each in found}))
            range_ = f"{min(rates):.2f} to {max(rates):.2f}"
            print(f"  {number:7} {statistics.median(rates):6.2f} iterations a second ({range_}); {threads}", flush=True)


if __name__ == "__main__":
    main()
