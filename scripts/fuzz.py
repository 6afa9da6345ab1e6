#!/usr/bin/env python3
"""Throw random options, data, chat templates and damaged files at every command until the time is over (`make fuzz`).

usage: scripts/fuzz.py [MINUTES]     or, against the wheel in dist:  scripts/from_wheel scripts/fuzz.py [MINUTES]

The exit code is 1 where a command ended with a traceback, another exit code than 0 or 2, several messages, or a file
outside its output folder; the example is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

import deltatune

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", nargs="?", type=float, default=30.0, help="how long to go on (default: 30)")
    minutes = parser.parse_args().minutes
    print(f"deltatune {importlib.metadata.version('deltatune')} in {Path(deltatune.__file__).parent}", flush=True)
    end = time.monotonic() + 60 * minutes
    rounds = failed = 0
    while time.monotonic() < end:
        rounds += 1
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--hypothesis-profile=fuzz"]
        # A seed, so that the round can be run again.
        command += [f"--hypothesis-seed={time.time_ns() % 2**32}", str(ROOT / "tests" / "fuzz")]
        print(f"round {rounds}: {' '.join(command[1:])}", flush=True)
        failed += subprocess.run(command, cwd=ROOT).returncode != 0
    print(f"{rounds} rounds, {failed} with a finding")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
