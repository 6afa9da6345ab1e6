"""Try deltatune with several versions of mlx, mlx-lm and mlx-vlm, and write docs/reference/versions.md.

usage: python scripts/compat [VERSION OF MLX-VLM ...]      default: every set of versions.py

With versions given, only their sets are run and nothing is written. The exit code is 1 where anything failed.
"""

from __future__ import annotations

import sys

import environment
import results
import table
from versions import SETS


def main(asked: list[str]) -> int:
    """Run the sets named in `asked`, or every set."""
    unknown = set(asked) - {versions.mlx_vlm for versions in SETS}
    if unknown:
        print(f"no set with mlx-vlm {', '.join(sorted(unknown))}; known: {[v.mlx_vlm for v in SETS]}", file=sys.stderr)
        return 2
    chosen = [versions for versions in SETS if not asked or versions.mlx_vlm in asked]
    found = [results.check(versions, environment.make(versions)) for versions in chosen]
    for result in found:
        print(f"{result.versions.name}: {', '.join(f'{run}: {result.counts(run)}' for run in result.tests)}")
        for each in result.failed:
            print(f"  FAILED {each}")
    if not asked:
        (environment.ROOT / "docs" / "reference" / "versions.md").write_text(table.page(found))
    for each in table.skips(found):
        print(f"skipped: {each}")
    return 1 if any(result.failed for result in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
