"""The order in which files of tests are handed to the processes that share them: the slowest first.

A slow file that comes last keeps one process working alone. Files that are not named here come after those that are,
the ones with most tests first, as pytest-xdist orders all of them by itself.
"""

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Files that take 10 s of a core and more, as measured in November 2026, and two that wait for as long.
SLOWEST = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split()


def slowest_first(items: list[pytest.Item]) -> None:
    """Sort tests by file; those of a file stay together, in their order. A named file that is missing is an error."""
    missing = [name for name in SLOWEST if not (TESTS / name).is_file()]
    if missing:
        raise pytest.UsageError(f"tests/slowest_first.txt names files that are not there: {', '.join(missing)}")
    ranks = {TESTS / name: rank for rank, name in enumerate(SLOWEST)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -sizes[item.path], str(item.path)))
