"""Tests the order in which a run tells of itself."""

from deltatune.train.reports.report import read_metrics as read_records
from deltatune.train.reports.screen import Screen


def test_records_are_in_the_files_before_they_are_shown(make_trainer, tmp_path, monkeypatch):
    """Whoever reads a line on the screen may open metrics.jsonl at once, and the report has its figures."""
    shown = []

    def show(self, record, **_):
        records, _ = read_records(tmp_path / "out" / "metrics.jsonl")
        kept = record["iteration"] == records[-1]["iteration"] and record.keys() == records[-1].keys()
        shown.extend((name, kept) for name in ("train_loss", "val_loss", "samples") if name in record)

    monkeypatch.setattr(Screen, "report", show)
    make_trainer(iters=2, steps_per_report=1, sample_prompts=["a"], steps_per_sample=1, sample_max_tokens=1).run()
    assert {name for name, _ in shown} == {"train_loss", "val_loss", "samples"}
    assert all(kept for _, kept in shown)
