#!/usr/bin/env python3
"""Kill training runs of every kind with SIGKILL, resume each, and compare its bits with those of a run never killed.

The kinds are adapters, full fine-tuning, experts, packed rows, images, and two processes over the ring.

usage: scripts/kill_runs.py [KILLS]
KILLS is their number over all kinds (default: 50).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/train/saved/test_kills.py", "tests/train/ending/test_peers.py")
KINDS = 6


def main(words: list[str]) -> int:
    wanted = int(words[0]) if words else 50
    each = -(-wanted // KINDS)
    print(f"{each} kills of each of {KINDS} kinds", flush=True)
    chosen = ["-k", "killed_at_random and not mpi", "--kills", str(each)]
    return subprocess.run([sys.executable, "-m", "pytest", "-v", "-s", *TESTS, *chosen], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
