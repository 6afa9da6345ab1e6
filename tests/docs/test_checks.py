"""Pages that scripts write equal what the scripts write now."""

import subprocess
import sys
from collections import Counter

import table
from pages import DOCS, ROOT
from results import Result
from results import Test as Outcome
from versions import Versions

import checks_table


def test_the_page_is_made_of_the_tests(request):
    """Of the tests of this session, if all files are among them; else the script collects them."""
    cases = request.config.stash[checks_table.MARKED]
    if {ROOT / file for file, _, _ in cases} == {*checks_table.files()}:
        made = checks_table.page(cases)
    else:
        command = [sys.executable, str(ROOT / "scripts" / "checks_table.py"), "--print"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        made = done.stdout
    assert (DOCS / "reference" / "checks.md").read_text(encoding="utf-8") == made, "run scripts/checks_table.py"


def test_cases_of_one_text_share_a_row():
    one, several = ("tests/a.py", "a | b\n", "test_a"), ("tests/a.py", "x" * 200, "test_b")
    cases = Counter({(file, checks_table._cell(given), test): 1 for file, given, test in (one, several)})
    cases[("tests/b.py", "c", "test_c")] = 3
    page = checks_table.page(cases)
    assert "## tests/a.py\n\n| given | test |\n|---|---|\n| a \\| b | `test_a` |\n" in page
    assert f"| {'x' * 100}… | `test_b` |" in page
    assert "| c (3 cases) | `test_c` |" in page


def results():
    passed = [Outcome("test_gradients", f"test_{n}", "passed", f"error {n}e-06; changed 4e-04") for n in (2, 7)]
    skipped = Outcome("test_patch", "test_skipped", "skipped", "no such family")
    failed = Outcome("test_training", "test_text[qwen3_5]", "failed", "off by | 0.1")
    first = Result(Versions("1.0", "2.0", "3.0"), "5.0", {"compat": [*passed, skipped]})
    second = Result(
        Versions("1.1", "2.1", "3.1"), "5.0", {"compat": [failed, skipped]}, ["metal: pytest ended with -1"]
    )
    return [first, second]


def test_the_page_counts_and_names_what_failed():
    page = table.page(results())
    assert "| 1 | 1.0 | 2.0 | 3.0 | 2 | 1 | 0 |" in page
    assert "| 2 | 1.1 | 2.1 | 3.1 | 0 | 1 | 1 |" in page
    assert "Passed: 2 of 2. Largest error: 7e-06." in " ".join(page.split())
    assert "test_training::test_text[qwen3_5]: off by | 0.1" in page
    assert "metal: pytest ended with -1" in page
    assert max(map(len, page.splitlines())) <= 120


def test_skips_are_given_once_with_their_sets():
    assert table.skips(results()) == ["no such family (sets 1, 2)"]
