"""Measures each run once: results are lines of a JSONL file, and runs that are in it already are not repeated."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def measured_once(results: Path, runs: Iterable[Run], measure: Callable[[Run, Path], Run]) -> list[Run]:
    """Measure the runs that the file lacks, add them to it and print them; return all that are in it.

    Args:
        results: The file, which need not exist.
        runs: What tells runs apart.
        measure: Returns the figures of a run, which may write into the folder.
    """
    done = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [json.loads(line) for line in done]
    for run in runs:
        if any(run.items() <= each.items() for each in found):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found.append(run | measure(run, Path(folder)))
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found[-1]) + "\n")
        print(json.dumps(found[-1]), flush=True)
    return found
