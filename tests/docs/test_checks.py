"""Pages that scripts write equal what the scripts write now."""

import subprocess
import sys
from collections import Counter

from pages import DOCS, ROOT

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
