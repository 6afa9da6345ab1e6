#!/usr/bin/env python3
"""Write docs/hardware.md from the records of `deltatune selftest` in docs/hardware.

usage: scripts/hardware_table.py
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from deltatune.selftest.record import HEADER, hardware_line

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "docs" / "hardware", ROOT / "docs" / "hardware.md"
INTRODUCTION = """# Machines that deltatune was tried on

`deltatune selftest` tries everything on the machine at hand: the doctor, every kernel against float64 at the sizes of
models, thirty training steps against transformers and PEFT, short trainings, the demo; and it measures `gated_delta`,
forward and backward, beside mlx-lm's loop and MLX's own operator, and times what decides which code is fast there:
every implementation at 512, 2,048 and 8,192 tokens, packed matrices, the disk. It prints a line a check and leaves
`deltatune-selftest.json`. Put that file into `docs/hardware` under the machine's name and run
`scripts/hardware_table.py`: it writes this page.

A check is not for a machine where what it tries is not there: CUDA's kernels on a Mac, a GPU's on a CPU. Times are in
milliseconds, the median of up to ten calls; memory is the peak beyond the inputs.
"""


def page(records: dict[str, dict[str, Any]]) -> str:
    """The whole page, made from records by the names of their files."""
    rows = [hardware_line(record) for _, record in sorted(records.items())]
    table = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}", *rows]
    parts = [INTRODUCTION, "\n".join(table) + "\n"]
    parts += [_failures(name, record) for name, record in sorted(records.items())]
    return "\n".join(part for part in parts if part)


def _failures(name: str, record: dict[str, Any]) -> str:
    """A section on the checks that failed on a machine, and on the machine's load at that time."""
    lines = [f"- {check['name']}: {check['detail']}" for check in record["checks"] if check["status"] == "failed"]
    if record.get("note"):
        lines.insert(0, f"- {record['note']}")
    wrapped = [textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    return f"## {name}\n" + "\n".join(wrapped) + "\n" if lines else ""


def records() -> dict[str, dict[str, Any]]:
    """The records in docs/hardware by the names of their files."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    found = records()
    unfinished = [name for name, record in found.items() if not record["finished"]]
    if unfinished:
        raise SystemExit(f"docs/hardware/{unfinished[0]}.json: the self-test was stopped before its end; run it again.")
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(found)} machines")


if __name__ == "__main__":
    main()
