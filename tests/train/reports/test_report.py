"""Tests the HTML report: sound, self-contained, escaped, with the right curves, and reloading while a run goes on."""

import base64
import dataclasses
import datetime
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deltatune.cli import parser
from deltatune.commands.flags import config_from
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train import StoppedError
from deltatune.train.reports.report import (
    ReportTable,
    RunDescription,
    options_yaml,
    plots,
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

    void = frozenset({"meta", "br", "img"})

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
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|@import|url\(|<link|<img|<iframe|fetch\(", page)
    # Of scripts, only the one that draws the curves runs.
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert "prefers-color-scheme:dark" in page


def test_every_text_is_escaped(page):
    for raw in ("<b>side", "<script>alert", "model<i>", "<img", "<i>ask", "<u>"):
        assert raw not in page
    escaped = ("&lt;script&gt;alert(1)&lt;/script&gt;", "a&amp;b", "Answers &lt;b&gt;", "model&lt;i&gt;", "&lt;u&gt;30")
    assert all(text in page for text in escaped)


def test_figures_curves_options_and_facts_of_the_run_are_there(page):
    figures = ("accuracy", "3 % → 97 %", "1.2500", "1,234", "2.5 GB", "2.5 min", "iters", "mlx-lm")
    about = (f"{datetime.date.today():%Y-%m-%d}", "some/data; 44 training examples", "lora, 5 of 100 numbers")
    for shown in (*figures, *about):
        assert shown in page
    assert ("OpenBLAS" in page) == (backend.device() == "cpu")
    assert [plot["title"] for plot in drawn(page)] == ["Loss per token", "Learning rate", "Peak memory, GB"]


def drawn(page):
    """The plots with points in a page."""
    return json.loads(re.search(r"<script type=application/json id=curves>(.*?)</script>", page)[1])


def test_the_curves_are_the_values_of_the_metrics():
    metrics = [
        {"iteration": 1, "train_loss": 1.23456789, "rewards/chosen": -0.5, "rewards/rejected": None},
        {"iteration": 2, "train_loss": None, "rewards/chosen": 1e-9},
        {"iteration": 2, "val_loss": 7},
    ]
    loss, rewards = plots({"": metrics})
    training = {"name": "training", "label": "training", "colour": 0, "dots": False, "best": False}
    validation = {"name": "validation", "label": "validation", "colour": 1, "dots": True, "best": True}
    training["points"] = [(1, 1.23457)]
    validation["points"] = [(2, 7.0)]
    assert loss == {"title": "Loss per preference", "zero": False, "curves": [training, validation]}
    assert [(curve["name"], curve["points"]) for curve in rewards["curves"]] == [("chosen", [(1, -0.5), (2, 1e-9)])]


def test_a_page_reloads_itself_only_while_the_run_goes_on(tmp_path):
    report, metrics = tmp_path / "report.html", tmp_path / "metrics.jsonl"
    metrics.write_text("")
    for running in (True, False):
        write_report(report, metrics, TrainConfig(iters=60), RESULT, RunDescription({}, running=running))
        page = report.read_text(encoding="utf-8")
        assert ("http-equiv=refresh" in page) == running
        assert ("value=0.5000></progress>" in page) == running
        assert ("The curves begin with the first report" in page) == running


def test_the_report_of_a_run_follows_it_and_says_how_it_stopped(make_trainer, run_with, tmp_path):
    report, pages = tmp_path / "out" / "report.html", []

    def follow(iterations, _):
        pages.append(report.read_text(encoding="utf-8"))
        iterations.ending.stop.asked = "still training" in pages[-1]
        assert len(pages) < 1000

    with pytest.raises(StoppedError):
        run_with(make_trainer(iters=100_000, save_every=100_000, steps_per_report=1, val_batches=0), follow)
    assert "http-equiv=refresh" in pages[-1]
    assert drawn(pages[-1])[0]["curves"][0]["points"]
    stopped = report.read_text(encoding="utf-8")
    assert re.search(r"[\d,]+ of 100,000 iterations of 4 rows; stopped: .*Run the same command with --resume", stopped)
    assert "http-equiv=refresh" not in stopped


def test_an_error_before_a_run_is_not_its_own(make_trainer, tmp_path):
    try:
        raise ValueError("an earlier attempt")
    except ValueError:
        make_trainer().run()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "iterations of 4 rows; ended<" in page
    assert "an earlier attempt" not in page
    assert "deltatune chat --model" in page


def test_the_report_of_a_run_that_fails_no_longer_reloads(make_trainer, run_with, tmp_path):
    def fail(iterations, batch):
        raise UserError("failed here")

    with pytest.raises(UserError, match="failed here"):
        run_with(make_trainer(), fail)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "iterations of 4 rows; stopped: failed here" in page
    assert "http-equiv=refresh" not in page


# The script puts the pointer on the first plot, moves by keys, presses its button, and tells what it sees.
# No window is narrower than 500 pixels, so a frame gives the page its width.
FRAME = Path(__file__).with_name("frame.html").read_text(encoding="utf-8")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


def in_browser(folder, width):
    """The view of the report in a folder in a browser of this width."""
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    # A browser in a container has no sandbox of its own.
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *flags, "--virtual-time-budget=4000", "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found, done.stdout[-3000:] + done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_draws_it_at_any_width_and_reads_its_values(page, tmp_path, width):
    seen = in_browser(tmp_path, width)
    assert (seen["width"], seen["wide"], seen["images"], seen["broken"]) == (width, [], 0, False)
    assert seen["titles"] == ["Loss per token", "Learning rate", "Peak memory, GB"]
    assert seen["pressed"] == ["false"] * 3
    first, second, before_last, last = (
        f"training {5 / (n + 1):.5g} at iteration {n} · validation {6 / (n + 1):.5g} at iteration {n}"
        for n in (0, 5, 25, 30)
    )
    assert seen["last"] == last
    assert seen["reads"] == [first, second, last, before_last, first, last]
    # On the logarithmic axis that its button gives, equal quotients lie equally far apart.
    assert seen["moved"]
    xs, ys = zip(*seen["points"], strict=True)
    assert (xs[0], xs[-1]) == (62, pytest.approx(seen["drawn"] - 10 * 6.2 - 12, abs=0.06))
    assert (ys[1] - ys[0]) / (ys[6] - ys[0]) == pytest.approx(math.log(6) / math.log(31), abs=0.002)
    assert {"0", "iteration", "training", "validation", f"best {6 / 31:.5g}"} <= set(seen["labels"])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_any_range_can_be_drawn(tmp_path):
    ranges = [[2.0], [0.0, 0.0], [1e-5, 1e-5], [-3.0, 4.0], [1e9, 2e9], [5.0, 5.0 + 1e-12], [1e-90, 1e90]]
    keys = [
        "train_loss",
        "rewards/chosen",
        "rewards/margins",
        "rewards/accuracies",
        "grad_norm",
        "aux_loss",
        "learning_rate",
    ]
    metrics = [
        {"iteration": n} | {key: values[n] for key, values in zip(keys, ranges, strict=True) if n < len(values)}
        for n in range(2)
    ]
    (tmp_path / "report.html").write_text(render("ranges", {"": metrics}), encoding="utf-8")
    seen = in_browser(tmp_path, 1200)
    assert (len(seen["titles"]), seen["broken"]) == (7, False)
    # The last range needs a logarithmic axis.
    assert seen["pressed"] == ["false"] * 6 + ["true"]


def test_options_that_differ_are_a_file_with_which_the_run_is_repeated(tmp_path):
    assert options_yaml(TrainConfig()) == ""
    lora = LoraConfig(rank=4, keys=["a"])
    config = TrainConfig(
        iters=5, learning_rate=1e-5, optimizer_config={"adam": {"eps": 1e-7}}, lora_parameters=lora, resume=True
    )
    (tmp_path / "run.yaml").write_text(options_yaml(config))
    arguments = parser("train").parse_args(["train", "-c", str(tmp_path / "run.yaml")])
    assert config_from(arguments) == dataclasses.replace(config, resume=False)
    assert "data: data in memory\n" in options_yaml(TrainConfig(data=[{"text": "a"}]))
    assert "iters" not in options_yaml(dataclasses.replace(config, epochs=2.0))


DAMAGED = {
    "cut": b'{"iteration": 5, "tra',
    "binary": bytes(range(256)),
    "no JSON": b"hello",
    "no object": b"[1, 2]",
    "no iteration": b'{"train_loss": 1.0}',
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
    assert len(drawn(report.read_text(encoding="utf-8"))) == 3


def test_missing_metrics_cost_the_curves_alone(tmp_path):
    said = write_report(tmp_path / "r.html", tmp_path / "metrics.jsonl", TrainConfig(), RESULT, RunDescription({}))
    assert said == ["metrics.jsonl is missing; the curves show the records that are left: 0."]
    assert "1.2500" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_report_without_metrics_has_no_curves():
    assert drawn(render("empty", {})) == []
