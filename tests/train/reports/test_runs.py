"""What a run shows of itself: the order of its records, the list of runs, and several in one report."""

import json
import os
import re

import pytest

from console import called
from deltatune.options.config import TrainConfig
from deltatune.train.reports.report import RunDescription, find, write_report
from deltatune.train.reports.report import read_metrics as read_records
from deltatune.train.reports.screen import Screen

RESULT = {"iterations": 2, "train_loss": 1.0, "val_loss": None, "seconds": 1.0, "tokens_per_second": 1.0}


def make(folder, losses, validation, when, **options):
    folder.mkdir(parents=True)
    records = [{"iteration": n, "train_loss": loss} for n, loss in enumerate(losses, 1)]
    records += [{"iteration": n, "val_loss": loss} for n, loss in enumerate(validation, 1)]
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = TrainConfig(adapter_path=str(folder), **options)
    write_report(folder / "report.html", metrics, config, RESULT | {"peak_memory": 1.0}, RunDescription({}))
    os.utime(metrics, (when, when))


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "b", [3.0, 2.0], [], 2e9, model="some/model", data="my <data>", learning_rate=2e-4)
    make(tmp_path / "below" / "a", [3.0, 2.5], [2.75, 2.25, 2.5], 1e9, model="some/model", data="other", iters=3)
    return tmp_path


def test_runs_are_listed_with_their_lowest_loss(folder):
    done = called("runs", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert rows[0] == ["folder", "date", "model", "data", "rate", "iterations", "best loss"]
    assert [row[:1] + row[2:] for row in rows[1:]] == [
        ["below/a", "some/model", "other", f"{TrainConfig().learning_rate:.6g}", "3", "2.25"],
        ["b", "some/model", "my <data>", "0.0002", "2", "2"],
    ]
    assert rows[1][1].startswith("2001-09-")
    # A run without a report has its metrics.
    (folder / "b" / "report.html").unlink()
    assert find([str(folder / "b")])[0].row()[2:] == (None, None, None, 2, 2.0)


def test_several_runs_are_in_one_report(folder):
    done = called("runs", "b", "below/a", "--report", "out.html", cwd=folder)
    assert done.stdout.splitlines()[-1] == "Report: out.html"
    page = (folder / "out.html").read_text(encoding="utf-8")
    (loss,) = json.loads(re.search(r"<script type=application/json id=curves>(.*?)</script>", page)[1])
    assert [(curve["name"], curve["label"], curve["colour"], len(curve["points"])) for curve in loss["curves"]] == [
        ("b training", "b", 0, 2), ("a training", "a", 1, 2), ("a validation", "", 1, 3),
    ]  # fmt: skip
    cells = re.findall(r'<td data-name="(?:option|b|a)">(.*?)</td>', page)
    assert cells[cells.index("data") :][:3] == ["data", "my &lt;data&gt;", "other"]
    assert "model" not in cells


@pytest.mark.bad_input("`runs --report` where no file can be written")
def test_a_report_that_cannot_be_written(folder):
    done = called("runs", "b", "--report", "b/metrics.jsonl/out.html", cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.search(r"^deltatune: 'b/metrics.jsonl'?.*: (Not a directory|File exists)", done.stderr)


@pytest.mark.bad_input("`runs FOLDER` where no run is")
def test_a_folder_without_runs(folder):
    (folder / "empty").mkdir()
    done = called("runs", "b", "empty", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "deltatune: empty: no run is there: expected a folder with metrics.jsonl, as --adapter-path has it.\n"
    )


def test_records_are_in_the_files_before_they_are_shown(make_trainer, tmp_path, monkeypatch):
    """Whoever reads a line on the screen may open metrics.jsonl at once, and the report has its figures."""
    shown = []

    def show(self, record, **_):
        records, _ = read_records(tmp_path / "out" / "metrics.jsonl")
        kept = record["iteration"] == records[-1]["iteration"] and record.keys() == records[-1].keys()
        shown.extend((name, kept) for name in ("train_loss", "val_loss", "samples") if name in record)

    monkeypatch.setattr(Screen, "report", show)
    make_trainer(iters=2, steps_per_report=1, sample_prompts=["a"], steps_per_eval=1).run()
    assert {name for name, _ in shown} == {"train_loss", "val_loss", "samples"}
    assert all(kept for _, kept in shown)
