"""docs/hardware.md equals the output of scripts/hardware_table.py for the records in docs/hardware."""

import json

import pytest

import hardware_table as table
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
