#!/usr/bin/env python3
"""Check that a wheel contains exactly the files of the package that git tracks.

usage: scripts/wheel_contents.py WHEEL
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# PyPI accepts 100 MB from a project by default; this package needs a tenth of that.
MOST_BYTES = 12 * 2**20


def main() -> int:
    """The exit code: 0 where the wheel has the right files, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel: Path = parser.parse_args().wheel
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {line.removeprefix("src/") for line in listed.splitlines()}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    for words, names in (("missing from", expected - found), ("not in git, but in", found - expected)):
        for name in sorted(names):
            print(f"{name}: {words} {wheel.name}", file=sys.stderr)
    size = wheel.stat().st_size
    print(f"{wheel.name}: {len(found)} files, {size / 2**20:.1f} MB")
    if size > MOST_BYTES:
        print(f"{wheel.name} is larger than {MOST_BYTES / 2**20:.0f} MB: what came in?", file=sys.stderr)
    return int(found != expected or size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
