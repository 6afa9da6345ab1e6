"""Runs the few tests that failed under `make test` once more, alone, and names those that pass then as unsteady.

A test of signals, pipes or processes can fail because the machine was busy. An unsteady test is still a defect, of the
test or of what it tests: its name is printed so that somebody mends it.
"""

import json
import subprocess
import sys
from pathlib import Path

# More failures than this are never chance.
_MOST = 3
ROOT = Path(__file__).resolve().parents[1]
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"


def main() -> int:
    """Return 0 if all that failed passes alone, otherwise 1."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not failed:
        print("make test failed before any test did; nothing is run again.")
        return 1
    if len(failed) > _MOST:
        print(f"{len(failed)} tests failed; only up to {_MOST} are run once more.")
        return 1
    print(f"Once more, alone: {', '.join(failed)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "pytest", "--tb=short", *failed], cwd=ROOT).returncode
    print(f"{'Still failing' if status else 'Unsteady (failed once, passed alone; please mend)'}: {', '.join(failed)}")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
