#!/usr/bin/env python3
"""Record the reference trajectories of docs/parity.md with transformers + PEFT, and print its table.

usage: scripts/record_oracle.py [--record] [CASE ...]      needs the `oracle` extra (scripts/make_env oracle)

Without --record nothing is written: every case is run live on both sides and compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "oracle"))

from parity import record
from parity.cases import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write tests/oracle/recorded/CASE.json")
    parser.add_argument("cases", nargs="*", help="default: all")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    print("| case | loss falls by | loss differs by at most | final adapters differ by | transformers, nudged by 1e-7 |")
    print("|---|---|---|---|---|")
    for name in arguments.cases or CASES:
        case = CASES[name]
        if arguments.record:
            reference, drift = record.record(name, case)
        else:
            reference = record.reference(case)
            drift = record.nudged(case, reference)
        found = record.compare(case, reference)
        print(f"| {name} | {reference.fall:.0%} | {found.loss:.1e} | {found.adapter:.1e} | {drift:.1e} |", flush=True)


if __name__ == "__main__":
    main()
