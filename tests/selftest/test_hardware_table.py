"""Pages that follow the self-test: the table of hardware, and statements on what has not run yet."""

import json
import re
from pathlib import Path

import pytest

import hardware_table as table
from deltatune.selftest import run
from deltatune.selftest.record import SelftestRecord


def test_the_page_is_made_of_the_records():
    assert table.PAGE.read_text(encoding="utf-8") == table.page(table.records())


def test_every_record_is_finished_and_has_its_own_line():
    for name, record in table.records().items():
        assert record["finished"], name
        assert record["line"] == table.hardware_line(record), name
        assert not record["quick"], name
        assert "/work" not in json.dumps(record), name


def test_failures_and_notes_are_told():
    record = next(iter(table.records().values())) | {"note": "Others used it."}
    record["checks"] = [{"name": "experts: bf16", "status": "failed", "detail": "y 1.0e+00 of 1.0e-06"}]
    page = table.page({"a-mac": record})
    assert "## a-mac\n- Others used it.\n- experts: bf16: y 1.0e+00 of 1.0e-06" in page
    assert "**1 failed**" in page


def test_a_record_that_was_stopped_is_refused(monkeypatch):
    monkeypatch.setattr(table, "records", lambda: {"a-mac": {"finished": False}})
    monkeypatch.setattr("sys.argv", ["hardware_table.py"])
    with pytest.raises(SystemExit, match=r"a-mac\.json: the self-test was stopped"):
        table.main()


@pytest.mark.parametrize(
    ("home", "written"),
    [("/home/josé", "~/x"), ("/", "/home/josé/x"), ("", "/home/josé/x"), ("relative", "/home/josé/x")],
)
def test_the_home_folders_name_alone_is_left_out(home, written, monkeypatch, tmp_path):
    """A container may have / for a home, or none."""
    monkeypatch.setenv("HOME", home)
    made = SelftestRecord.__new__(SelftestRecord)
    made.path, made.content = tmp_path / "record.json", {"path": "/home/josé/x", "speed": "1.5 GFLOP/s", "load": 0.5}
    made.write()
    assert json.loads(made.path.read_text()) == {"path": written, "speed": "1.5 GFLOP/s", "load": 0.5}


ROOT = Path(__file__).parents[2]
PHRASE = "not yet run on Apple hardware"
# By the subject of a statement, the beginning of the name of the check that tries it.
CHECKS = {
    r"products of one row": "doctor: NaN in products of one row (BLAS)",
    r"`chunk_bf16`": "gated delta, chunk_bf16: scalar gates, bf16",
}


def statements(text: str) -> list[str]:
    """The table rows and paragraphs of a document that contain PHRASE, each as one line."""
    parts = re.split(r"\n\s*\n|\n(?=\||#|- )", text)
    return [flat for part in parts if PHRASE in (flat := " ".join(part.split()))]


def test_every_statement_has_a_check():
    names = run.names()
    made = [
        (path.name, statement)
        for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md")))
        for statement in statements(path.read_text(encoding="utf-8"))
    ]
    assert made
    for place, statement in made:
        checks = [check for subject, check in CHECKS.items() if re.search(subject, statement)]
        assert checks, f"{place}: no check of `deltatune selftest` tries this: {statement}"
        assert any(name.startswith(check) for check in checks for name in names), checks


def test_a_statement_is_found_across_lines_and_by_row():
    text = f"# Head\n\nSomething was {PHRASE.replace(' Apple', chr(10) + 'Apple')}.\n\n| a | {PHRASE} |\n| b | run |\n"
    assert statements(text) == [f"Something was {PHRASE}.", f"| a | {PHRASE} |"]


def test_names_are_not_used_twice():
    names = run.names()
    assert len(names) == len(set(names))
    assert set(run.names(quick=True)) < set(names)
