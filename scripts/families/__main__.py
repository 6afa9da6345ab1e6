"""Train a tiny model of every model type of mlx-lm in every way, and write docs/reference/families.md.

usage: python scripts/families [TYPE ...]      default: every type

Each type runs in a process of its own with a time limit, so that one that crashes stops no other. The results are kept
in .families/TYPE.json. With types given, only those are run and nothing is written. The exit code is 1 where a result
is worse than known.json says, which has what did not work when the page was last written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import table
from configurations import types

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".families"
# Seconds. A type takes five on one core.
LIMIT = 600


def examine(kind: str) -> dict[str, Any]:
    """Run a type in a process of its own and return its results."""
    command = [sys.executable, str(Path(__file__).with_name("one_type.py")), kind]
    environment = {"DELTATUNE_THREADS": "1"} | os.environ
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"type": kind, "made": f"no result after {LIMIT} seconds"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.splitlines() or ["nothing was printed"])[-1]
        return {"type": kind, "made": f"the process ended with {done.returncode}: {last[:200]}"}
    return json.loads(lines[-1])


def main(asked: list[str]) -> int:
    """Run the types in `asked`, or every type."""
    known = types()
    if unknown := set(asked) - set(known):
        print(f"no model type {', '.join(sorted(unknown))} in this version of mlx-lm", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for kind in asked or known:
        result = examine(kind)
        (FOLDER / f"{kind}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(table.line(result), flush=True)
    results = [json.loads((FOLDER / f"{kind}.json").read_text()) for kind in asked or known]
    worse = table.worse(results)
    for sentence in worse:
        print(f"WORSE THAN KNOWN {sentence}")
    if not asked:
        table.remember(results)
        table.write(ROOT / "docs" / "reference" / "families.md", results)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
