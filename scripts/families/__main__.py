"""Train a tiny model of every model type of mlx-lm and mlx-vlm in every way, and write docs/reference/families.md.

usage: python scripts/families [TYPE ...]      default: every type

Two processes run them, and where a type ends its process, the rest run in another. The results are kept in
.families/TYPE.json. A type of mlx-vlm is called mlx_vlm.TYPE. With types given, only those are run and nothing
is written. The exit code is 1 where a result is worse than known.json says, which has what did not work when the page
was last written.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  Before mlx: it binds MLX to a fast BLAS.

# isort: split
import table
from packages import PACKAGES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".families"
# Each with one BLAS thread, as in `make test`.
WORKERS = 2


def examine(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Run types in a process of their own and yield their results; one that ends it is followed by another process."""
    remaining = list(kinds)
    while remaining:
        command = [sys.executable, str(Path(__file__).with_name("one_type.py")), *remaining]
        environment = {"DELTATUNE_THREADS": "1"} | os.environ
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):
                    remaining.pop(0)
                    yield json.loads(text)
            if process.wait() == 0:
                return
            errors.seek(0)
            last = (errors.read().splitlines() or ["nothing was printed"])[-1]
        yield {"type": remaining.pop(0), "made": _ending(process.returncode, last)}


def examine_all(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Run types in as many processes as WORKERS says, and yield their results as they come."""
    results: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def work(part: list[str]) -> None:
        try:
            for result in examine(part):
                results.put(result)
        finally:
            results.put(None)

    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(work, kinds[first::WORKERS]) for first in range(WORKERS)]
        for _ in futures:
            while (result := results.get()) is not None:
                yield result
        for future in futures:
            future.result()


def _ending(code: int, last: str) -> str:
    """Say how a process ended, by its code and the last line that it printed."""
    if code < 0:
        return f"the process ended by {signal.Signals(-code).name}"
    return f"the process ended with {code}: {last[:200]}"


def main(asked: list[str]) -> int:
    """Run the types in `asked`, or every type."""
    known = [kind for package in PACKAGES for kind in package.types()]
    if unknown := set(asked) - set(known):
        print(f"no model type {', '.join(sorted(unknown))} in these versions of mlx-lm and mlx-vlm", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    found = {}
    for result in examine_all(asked or known):
        (FOLDER / f"{result['type']}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(table.line(result), flush=True)
        found[result["type"]] = result
    results = [found[kind] for kind in asked or known]
    worse = table.worse(results)
    for sentence in worse:
        print(f"WORSE THAN KNOWN {sentence}")
    if not asked:
        table.remember(results)
        table.write(ROOT / "docs" / "reference" / "families.md", results)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
