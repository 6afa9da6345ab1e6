"""The page that `make compat` writes, from results that are made up here."""

import table
from results import Result
from results import Test as Outcome
from versions import Versions


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
