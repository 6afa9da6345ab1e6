#!/usr/bin/env python3
"""Record the reference runs of docs/how/parity.md with transformers and PEFT, and print the page's table.

usage: scripts/record_oracle.py [--record] [CASE ... | continued]   needs the `oracle` extra (scripts/make_env oracle)

Without --record the script writes nothing: it runs every case on both sides and compares them. `continued` records
the runs of PEFT from an exported adapter (tests/oracle/test_continued.py), and only that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "oracle"))

from parity import continued, continued_theirs, record, vision_record

from deltatune.selftest.parity import vision
from deltatune.selftest.parity.cases import CASES

ALL = CASES | {f"vision/{name}": case for name, case in vision.CASES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write selftest/parity/recorded/CASE.json")
    parser.add_argument("cases", nargs="*", help="default: all")
    arguments = parser.parse_args()
    if arguments.cases == ["continued"]:
        record_continued()
        return
    unknown = set(arguments.cases) - set(ALL)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(ALL)}")
    print("| case | loss falls by | loss | first gradients | final adapters | transformers nudged: loss | adapters |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.cases or ALL:
        case = ALL[name]
        side: Any = record if name in CASES else vision_record
        if arguments.record:
            reference, drift = side.record(name.removeprefix("vision/"), case)
        else:
            reference = side.reference(case)
            drift = side.nudged(case, reference)
        found = side.compare(case, reference)
        errors = (found.loss, found.gradient, found.adapter, drift.loss, drift.adapter)
        print(f"| {name} | {reference.fall:.0%} | {' | '.join(f'{e:.1e}' for e in errors)} |", flush=True)


def record_continued() -> None:
    """Write the recordings of PEFT's training from exported adapters."""
    for name in continued.REPLAYED:
        with tempfile.TemporaryDirectory() as folder:
            continued_theirs.record(name, CASES[name], Path(folder))


if __name__ == "__main__":
    main()
