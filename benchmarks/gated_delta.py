"""Times the gated delta rule on this machine's GPU, forward and backward, beside all other installed implementations.

usage: python benchmarks/gated_delta.py RESULTS.json [--only NAME ...] [--sizes [SIZE ...]] [--lengths [T ...]]
                                        [--limit 120] [--seconds 500] [--tiny]

Implementations run in processes of their own, one after another. One that is not installed is named once. A process
takes one size after another; one that fails, dies or needs more than --limit seconds at a size is replaced by a new
one for the sizes after it, so that no implementation and no size stops another.

An implementation is first compared with a float64 recurrence on the first tokens (verify.py), and gets no time where
it differs. For each size (sizes.py) it then measures: the median of 20 calls, each waited for; many calls in a row,
none waiting for the one before (a replayed CUDA graph for FLA and FlashQLA); the forward pass alone; and the peak
memory beyond inputs and gradients. Every record is printed and written to RESULTS.json at once; tables.py and plot.py
read such files, several at once too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import processes
from machine import cpu, gpu, gpu_bytes, versions
from registry import Entry, on
from sizes import GPU, LENGTHS, SWEEP, TINY, TINY_SWEEP, Size, inputs
from tables import gated_delta_tables, line
from verify import CHECKED, Errors, errors

CALLS, FEW_CALLS = 20, 3
# A call that takes longer than this is called few times; one that would take longer than that is not called.
LONG, TOO_LONG = 0.3, 4.0
IN_A_ROW = 0.4  # seconds, about
NOTE = "note: "
OUT_OF_TIME = "the time of the whole run was up"
ENTRIES = on("gpu")


class Bench:
    """Measures one implementation in its process, and predicts from each size how long the next one takes."""

    def __init__(self, entry: Entry, folder: Path, device_bytes: float) -> None:
        self.entry, self.folder, self.device_bytes = entry, folder, device_bytes
        self.implementation = entry.make()
        self.times_only = getattr(self.implementation, "times_only", lambda: None)()
        self.checked: dict[Size, Errors] = {}
        self.seconds_a_unit = self.bytes_a_unit = 0.0

    def record(self, size: Size) -> dict[str, Any]:
        found: dict[str, Any] = {"implementation": self.entry.name, "size": size.record()}
        if not self.entry.takes(size):
            return found | {"skipped": "does not take this kind of gate"}
        reason = self.too_much(size)
        if reason is not None:
            return found | {"skipped": reason}
        short = size.of_length(CHECKED)
        if short not in self.checked:
            self.checked[short] = errors(self.implementation, size, self.folder)
        error = self.checked[short]
        found |= {"errors": error.decisive, "agrees": error.agrees, "times_only": self.times_only}
        if not error.agrees and self.times_only is None:
            return found | {"failed": f"wrong: {error.worst[0]} is {error.worst[1]:.1e} off the recurrence: not timed"}
        return found | self.measure(size)

    def too_much(self, size: Size) -> str | None:
        seconds, needed = self.seconds_a_unit * size.work, self.bytes_a_unit * size.work
        if seconds > TOO_LONG:
            return f"would take about {seconds:.0f} s a call"
        if needed > 0.9 * self.device_bytes:
            return f"would take about {needed / 1e9:.0f} GB"
        return None

    def measure(self, size: Size) -> dict[str, Any]:
        implementation = self.implementation
        implementation.load(inputs(size), size.dtype)
        first = timed(implementation.both)
        found: dict[str, Any] = {"first": first}
        second = timed(implementation.both)
        calls = CALLS if second < LONG else FEW_CALLS
        found |= {"calls": calls, "as_called": median(implementation.both, calls)}
        found["forward"] = median(implementation.forward, calls)
        memory = implementation.excess()
        if found["as_called"] < LONG:
            number = max(5, min(200, int(IN_A_ROW / found["as_called"])))
            found["in_a_row"], found["how"] = implementation.in_a_row(number)
        implementation.release()
        self.seconds_a_unit = found["as_called"] / size.work
        self.bytes_a_unit = sum(memory.values()) / size.work
        return found | memory


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median(call: Any, calls: int) -> float:
    return statistics.median(timed(call) for _ in range(calls))


def work(name: str, sizes: list[Size], folder: Path) -> None:
    """The process of one implementation: a line of JSON for each size, to the first at which an error is raised."""
    entry = ENTRIES[name]
    if "torch" not in entry.needs:
        import deltatune  # noqa: F401  (binds OpenBLAS on a CPU, so before mlx)

        # What the package says: which implementation it chose, how long its check took.
        logging.basicConfig(format=f"{NOTE}%(message)s", stream=sys.stdout)
        logging.getLogger("deltatune").setLevel(logging.INFO)
    bench: Bench | None = None
    for size in sizes:
        try:
            bench = bench or Bench(entry, folder, gpu_bytes())
            found = bench.record(size)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other sizes and implementations go on)
            print(json.dumps({"implementation": name, "size": size.record(), "failed": said(error)}), flush=True)
            # An error may leave the GPU's context unusable: a new process takes the other sizes. This one just ends.
            os._exit(0)
        print(json.dumps(found), flush=True)


def said(error: BaseException) -> str:
    first = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {''.join(first)[:300]}"


def lines_of(name: str, sizes: list[Size], folder: Path, limit: float, end: float) -> Any:
    """Yield the records of one process until it ends, or until a size takes too long; returns why it stopped early."""
    asked = json.dumps([size.record() for size in sizes])
    command = [sys.executable, __file__, "--work", name, "--asked", asked, "--folder", str(folder)]
    with tempfile.TemporaryFile("w+") as complaints:
        # A group of its own, so that the compilers which it starts end with it.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, start_new_session=True
        )
        read: queue.Queue[str | None] = queue.Queue()

        def pass_on() -> None:
            assert process.stdout is not None
            for text in process.stdout:
                read.put(text)
            read.put(None)

        threading.Thread(target=pass_on, daemon=True).start()
        until = time.monotonic() + limit
        try:
            while (text := read.get(timeout=max(0.1, min(until, end) - time.monotonic()))) is not None:
                # Lines that are no records come from libraries.
                if text.startswith("{"):
                    yield json.loads(text)
                    until = time.monotonic() + limit
                elif text.startswith(NOTE):
                    print(text.removeprefix(NOTE), end="", flush=True)
        except queue.Empty:
            yield f"not done within {limit:.0f} s" if until < end else OUT_OF_TIME
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            complaints.seek(0)
            last = complaints.read().strip().splitlines()[-1:] or [""]
            yield f"its process ended with exit code {process.returncode}: {last[0][:300]}"


def records(entry: Entry, sizes: list[Size], folder: Path, limit: float, end: float) -> Any:
    """Yield a record for each size; a process that stops at a size is replaced for the sizes after it."""
    left = list(sizes)
    while left and time.monotonic() < end:
        before = len(left)
        for found in lines_of(entry.name, left, folder, limit, end):
            if found == OUT_OF_TIME or not left:
                break
            size = left.pop(0)
            broken = {"implementation": entry.name, "size": size.record(), "failed": found}
            yield found if isinstance(found, dict) else broken
        if len(left) == before:
            break
    for size in left:
        yield {"implementation": entry.name, "size": size.record(), "skipped": OUT_OF_TIME}


def main() -> None:
    options = parse()
    if options.work:
        work(options.work, [Size.of_record(record) for record in json.loads(options.asked)], Path(options.folder))
        return
    table, sweep = chosen(options)
    sizes = list(dict.fromkeys([*table, *sweep]))
    missing = {name: ENTRIES[name].missing for name in options.only if ENTRIES[name].missing}
    result: dict[str, Any] = {
        "what": "gated_delta",
        "date": str(date.today()),
        "machine": {"gpu": gpu(), "cpu": cpu()},
        "versions": versions(),
        "table": [size.record() for size in table],
        "sweep": [size.record() for size in sweep],
        "missing": missing,
        "records": [],
    }
    print(f"{result['date']}, {gpu() or 'no GPU'}, {cpu()}; {versions()}", flush=True)
    for name, modules in missing.items():
        print(f"{name}: not installed ({', '.join(modules)})", flush=True)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            takes = [size for size in sizes if ENTRIES[name].takes(size) and name not in missing]
            for found in records(ENTRIES[name], takes, Path(folder), options.limit, end):
                result["records"].append(found)
                print(line(found), flush=True)
                Path(options.results).write_text(json.dumps(result, indent=1))
    print(f"\n{gated_delta_tables(result)}")


def chosen(options: argparse.Namespace) -> tuple[list[Size], list[Size]]:
    """The sizes of the table and those of the plot; both where neither is asked for."""
    table, sweep = (TINY, TINY_SWEEP) if options.tiny else (GPU, SWEEP)
    if options.lengths:
        sweep = [replace(sweep[0], tokens=tokens) for tokens in options.lengths]
    if options.sizes is None and options.lengths is None:
        return table, sweep
    return [] if options.sizes is None else options.sizes or table, [] if options.lengths is None else sweep


def parse() -> argparse.Namespace:
    parser = processes.parser(__doc__)
    parser.add_argument("results", nargs="?", default=os.devnull, help="the file to write, JSON")
    names = list(ENTRIES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    sizes = "only these sizes, such as 1x8192x16/32 or 1x8192x16/32/channel; without any, those of the table"
    parser.add_argument("--sizes", nargs="*", type=size_written, metavar="SIZE", help=sizes)
    lengths = f"only the sizes of the plot: one row of these lengths; without any, {LENGTHS[0]} to {LENGTHS[-1]}"
    parser.add_argument("--lengths", nargs="*", type=int, metavar="T", help=lengths)
    parser.add_argument("--limit", type=float, default=120, help="seconds of an implementation at a size")
    parser.add_argument("--seconds", type=float, default=500, help="of the whole run")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the program on a CPU")
    for name in ("--work", "--asked", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def size_written(text: str) -> Size:
    try:
        return Size.written(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
