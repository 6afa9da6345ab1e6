"""Tests the HTML report: sound, self-contained, escaped, with curves at the right places."""

import datetime
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from deltatune.machine import backend
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.reports import curves
from deltatune.train.reports.report import (
    ReportTable,
    RunDescription,
    RunReport,
    changed_options,
    read_metrics,
    render,
    write_report,
)

RESULT = {
    "iterations": 30,
    "train_loss": 1.25,
    "val_loss": None,
    "seconds": 150.0,
    "tokens_per_second": 1234.5,
    "peak_memory": 2.5,
}


class Balanced(HTMLParser):
    """Parses HTML, and fails if a closing tag does not match the tag that is open."""

    void = frozenset({"meta", "polyline", "line", "circle", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.attributes = [], []

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def records():
    for n in range(0, 31, 5):
        yield {"iteration": n, "train_loss": 5 / (n + 1), "grad_norm": None, "learning_rate": 1e-5, "peak_memory": 1.0}
        yield {"iteration": n, "val_loss": 6 / (n + 1), "val_time": 1.0}
        yield {"iteration": n, "samples": [{"prompt": f"{'long' * 50}\n<i>ask</i>", "answer": f"say\n<u>{n}</u>"}]}


@pytest.fixture
def page(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records()))
    samples = ReportTable(
        "Answers <b>side by side</b>", ("prompt", "before", "after"), [("<script>alert(1)</script>", "a&b", 7)]
    )
    config = TrainConfig(model="some/model<i>", iters=30, project_name="'\"><img src=x>")
    about = {"data": "some/data; 44 training examples", "trained": "lora, 5 of 100 numbers"}
    report = tmp_path / "report.html"
    headline = {"accuracy": "3 % → 97 %"}
    assert write_report(report, metrics, config, RESULT, RunDescription(about, [samples], headline)) == []
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_is_sound_and_fetches_nothing(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not {name for name, _ in parser.attributes} & {"src", "href", "srcset", "onload", "onerror"}
    assert not re.search(r"https?:|@import|url\(|<script|<link|<img|<iframe", page)
    assert "prefers-color-scheme:dark" in page


def test_every_text_is_escaped(page):
    for raw in ("<b>side", "<script>", "model<i>", "<img", "<i>ask", "<u>"):
        assert raw not in page
    for escaped in (
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "a&amp;b",
        "Answers &lt;b&gt;",
        "model&lt;i&gt;",
        "&lt;u&gt;30",
    ):
        assert escaped in page


def test_figures_curves_options_and_versions_are_there(page):
    for shown in ("accuracy", "3 % → 97 %", "1.2500", "1,234", "2.5 GB", "2.5 min", "iters", "mlx-lm"):
        assert shown in page
    assert ("OpenBLAS" in page) == (backend.device() == "cpu")
    # One drawing of each plot is for phones.
    assert page.count("<svg class=broad") == page.count("<svg class=narrow") == 3
    assert "Loss per token" in page
    assert "Gradient norm" not in page


# The frame gives the page the width of a screen, and the script writes what overflows it.
FRAME = """<iframe id=frame src=report.html style="border:0;width:{width}px;height:4000px"></iframe><script>
frame.onload = () => {{
  const page = frame.contentDocument, shown = [...page.querySelectorAll("svg")].filter(x => x.clientWidth);
  const wide = [...page.querySelectorAll("body *")].filter(x => x.scrollWidth > x.clientWidth && x.clientWidth);
  document.title = [page.documentElement.scrollWidth, shown.length, wide.map(x => x.outerHTML.slice(0, 80))].join("|");
}}</script>"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_no_screen_has_to_scroll_sideways(page, tmp_path, width):
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    # A browser in a container has no sandbox of its own.
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    command = [BROWSER, *flags, (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\d+)\|(\d+)\|(.*?)</title>", done.stdout)
    assert found, done.stdout + done.stderr
    assert (int(found[1]), int(found[2]), found[3]) == (width, 3, "")


def test_date_data_and_what_trained_are_there(page):
    for shown in (f"{datetime.date.today():%Y-%m-%d}", "some/data; 44 training examples", "lora, 5 of 100 numbers"):
        assert shown in page


def test_only_options_that_differ_are_listed():
    assert changed_options(TrainConfig()) == []
    config = TrainConfig(iters=5, optimizer_config={"adamw": {}}, lora_parameters=LoraConfig(rank=4, keys=["a"]))
    assert changed_options(config) == [
        ("optimizer_config", {"adamw": {}}),
        ("lora_parameters.rank", 4),
        ("lora_parameters.keys", ["a"]),
        ("iters", 5),
    ]


DAMAGED = {
    "cut": b'{"iteration": 5, "tra',
    "binary": bytes(range(256)),
    "no JSON": b"hello",
    "no object": b"[1, 2]",
    "no iteration": b'{"train_loss": 1.0}',
    "text for a number": b'{"iteration": 5, "train_loss": "low"}',
    "samples that are no list": b'{"iteration": 5, "samples": 7}',
    "samples without an answer": b'{"iteration": 5, "samples": [{"prompt": "x"}]}',
    "infinite": b'{"iteration": 5, "train_loss": Infinity}',
    "huge": b'{"iteration": 5, "train_loss": 1e308}',
    "nested": b"[" * 100_000,
    "long number": b'{"iteration": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.bad_input("a line of metrics.jsonl that is damaged ({kind}): the report leaves it out")
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_line_of_metrics_costs_that_line_and_it_is_said(tmp_path, kind):
    metrics, report = tmp_path / "metrics.jsonl", tmp_path / "report.html"
    sound = [json.dumps(record).encode() for record in records()]
    lines = DAMAGED[kind].count(b"\n") + 1
    metrics.write_bytes(b"\n".join([*sound[:4], DAMAGED[kind], *sound[4:]]))
    found, damaged = read_metrics(metrics)
    assert found == list(records())
    assert damaged >= lines
    said = write_report(report, metrics, TrainConfig(), RESULT, RunDescription({}))
    assert said == [f"damaged lines in metrics.jsonl: {damaged}; the curves show the records that are left: 21."]
    assert said[0][1:] in report.read_text(encoding="utf-8")
    assert report.read_text(encoding="utf-8").count("<svg class=broad") == 3


def test_missing_metrics_cost_the_curves_alone(tmp_path):
    said = write_report(tmp_path / "r.html", tmp_path / "metrics.jsonl", TrainConfig(), RESULT, RunDescription({}))
    assert said == ["metrics.jsonl is missing; the curves show the records that are left: 0."]
    assert "1.2500" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_curves_lie_where_the_numbers_say():
    points = [(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)]
    svg = curves.plot([curves.Curve("x", points)])
    drawn = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]*)"', svg)[1].split()]
    (x0, y0), (x1, y1), (x2, y2) = drawn
    assert (x0, x2) == (curves.LEFT, curves.WIDTH - curves.RIGHT)
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.2)
    assert min(y0, y1, y2) > curves.TOP
    assert max(y0, y1, y2) < curves.HEIGHT - curves.BOTTOM + 0.1


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [1e-5, 1e-5], [-3.0, 4.0], [1e9, 2e9], [5.0, 5.0 + 1e-12]])
def test_any_range_can_be_drawn(values):
    svg = curves.plot([curves.Curve("", list(enumerate(values)))])
    assert "nan" not in svg
    assert "inf" not in svg


def test_ticks_are_round_and_inside():
    assert curves.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert curves.ticks(0.13, 0.58) == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert all(-2 <= tick <= 7 for tick in curves.ticks(-2, 7))


def test_a_report_without_metrics_has_no_curves():
    assert "<svg" not in render(RunReport("empty"))
