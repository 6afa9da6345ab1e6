"""Tests the order in which a run tells of itself."""

from deltatune.train.reports.report import read_metrics as read_records
from deltatune.train.reports.screen import Screen


def test_records_are_in_the_files_before_they_are_shown(make_trainer, tmp_path, monkeypatch):
    """Whoever reads a line on the screen may open metrics.jsonl at once, and the report has its figures."""
    shown = []
    for name in ("training", "validation", "samples"):

        def show(self, record, *_, name=name, **__):
            records, _ = read_records(tmp_path / "out" / "metrics.jsonl")
            shown.append(
                (name, record["iteration"] == records[-1]["iteration"] and record.keys() == records[-1].keys())
            )

        monkeypatch.setattr(Screen, name, show)
    make_trainer(iters=2, steps_per_report=1, sample_prompts=["a"], steps_per_sample=1, sample_max_tokens=1).run()
    assert dict(shown) == {"training": True, "validation": True, "samples": True}
    assert all(kept for _, kept in shown)
