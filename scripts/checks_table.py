#!/usr/bin/env python3
"""Write docs/reference/checks.md, a row for each mistake of a user that a test makes on purpose.

usage: scripts/checks_table.py [--print]

A test is listed where it is marked `@pytest.mark.bad_input("what is given")`. Names in braces stand for its
parameters: `bad_input("{flag} {value}")` gives a row for each case.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "checks.md"
INTRODUCTION = """# Every check of what is given

Each row is a mistake that a test makes on purpose. It ends with exit code 2 and one message, which says what was
expected, what came and what to do; in Python it is a `UserError`. `make fuzz` looks for what nobody thought of.
`scripts/checks_table.py` writes this page from the tests that are marked `bad_input`.
"""
_LONGEST = 100
#: Where a session of pytest keeps the counts of its own tests.
MARKED = pytest.StashKey[Counter[tuple[str, str, str]]]()


class _Collector:
    """A plugin of pytest that keeps the marks of the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.cases = cases_of(items)


def cases_of(items: list[Any]) -> Counter[tuple[str, str, str]]:
    """Count the cases that are marked `bad_input`, by test file, text and test."""
    cases: Counter[tuple[str, str, str]] = Counter()
    for item in items:
        file, _, test = item.nodeid.partition("::")
        for mark in item.iter_markers("bad_input"):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            cases[file, _cell(mark.args[0].format(**parameters)), test.partition("[")[0]] += 1
    return cases


def files() -> list[Path]:
    """The files with marked tests, in the page's order."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "bad_input(" in path.read_text("utf-8")]


def _cell(text: str) -> str:
    """A text that fits one cell of a table."""
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return (line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…").replace("|", "\\|")


def page(cases: Counter[tuple[str, str, str]]) -> str:
    """The whole page: a table for each file of tests."""
    parts = [INTRODUCTION]
    for file in sorted({file for file, _, _ in cases}, key=Path):
        rows = [
            f"| {given}{f' ({count} cases)' if count > 1 else ''} | `{test}` |"
            for (in_file, given, test), count in cases.items()
            if in_file == file
        ]
        parts.append(f"## {file}\n\n| given | test |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def collect() -> Counter[tuple[str, str, str]]:
    """Let pytest collect the tests that are marked."""
    collector = _Collector()
    command = ["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *map(str, files())]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(command, plugins=[collector])
    if code:
        raise SystemExit("the tests cannot be collected; what pytest wrote above says why.")
    return collector.cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="write to standard output instead")
    text = page(collect())
    if parser.parse_args().print:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: {text.count(chr(10) + '| ')} rows")


if __name__ == "__main__":
    main()
