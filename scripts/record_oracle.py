#!/usr/bin/env python3
"""Record the reference runs of docs/how/parity.md with transformers, PEFT and TRL, and print the page's table.

usage: scripts/record_oracle.py [--record] [CASE ... | continued]   needs the `oracle` extra (scripts/make_env oracle)

Without --record the script writes nothing: it runs every case on both sides and compares them. `continued` records
the runs of PEFT from an exported adapter (tests/oracle/test_continued.py), and only that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "oracle"))

from parity import ahead_theirs, continued, continued_theirs, distilled_theirs, pairs_theirs, record, vision_theirs

from deltatune.selftest.parity.cases import CASES

_OTHERS = (vision_theirs, pairs_theirs, distilled_theirs, ahead_theirs)
COMPARISONS = (record.TEXT, *(side.COMPARISON for side in _OTHERS))
ALL = {f"{side.folder}{name}": (side, name) for side in COMPARISONS for name in side.cases}


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
        side, of_side = ALL[name]
        case = side.cases[of_side]
        if arguments.record:
            reference, drift = side.record(of_side)
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
