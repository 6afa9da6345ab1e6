"""Writes a run's report as one HTML page, which loads nothing from elsewhere and in which all text is escaped.

While the run goes on, the page reloads itself. Its curves are drawn in the browser (report.js) from points that stand
in the page. Past runs are found by their files, and several of them share one page.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import html
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from ...errors import UserError
from ...machine import backend, packages
from ...machine.atomic_files import write
from ...options.config import TrainConfig
from ..saved.state import write_atomically
from .log import REWARD, SAMPLES, Record, is_right, tally
from .screen import gigabytes


def _both(key: str) -> dict[str, str]:
    return {key: "training", f"val_{key}": "validation"}


_REWARDS = ("rewards/chosen", "rewards/rejected")
# By the title of a plot, the names of its curves by the keys of their values in a record of metrics.jsonl. Curves of
# validation have dots at their points. "" is the name of a curve that is the only one.
_PLOTS = {
    "Reward of sampled answers": _both("reward") | {"reward_std": "deviation"},
    "Share of exact answers": _both("rewards/exact"),
    "Tokens of an answer": _both("completions/mean_length"),
    "Entropy of a sampled token": {"entropy": ""},
    "Divergence from the reference": {"kl": ""},
    "Difference between sampler and training, in nats": {
        "sampling/sampling_logp_difference/mean": "mean",
        "sampling/sampling_logp_difference/max": "largest",
    },
    "Seconds of a sampling": {"seconds/sampling": "answers", "seconds/rewards": "rewards"},
    "Rewards": dict(zip(_REWARDS, ("chosen", "rejected"), strict=True)),
    "Margin of the chosen answer's reward": _both("rewards/margins"),
    "Share of pairs whose chosen answer has the larger reward": _both("rewards/accuracies"),
    "Gradient norm, before clipping": {"grad_norm": ""},
    "Learning rate": {"learning_rate": ""},
    "Tokens per second": {"tokens_per_second": ""},
    "Peak memory, GB": {"peak_memory": ""},
    "Load-balancing loss of the routers": {"aux_loss": ""},
}
# The keys of plots with a y axis that starts at 0 or below, so that it is linear until the reader chooses otherwise.
_FROM_ZERO = {
    *("rewards/exact", "completions/mean_length", "entropy", "kl", "learning_rate", "tokens_per_second", "peak_memory"),
}


def plots(runs: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """Return the plots for which the records of runs, by name, hold values, as report.js takes them.

    The name of a run is empty where there is one alone. A plot has its `title`, `zero` and `curves`; a curve its
    `name`, the `label` at its end, the number of its colour, `dots`, `best` for the loss of validation, and `points`:
    pairs of an iteration and a value.
    """
    of_pairs = any(record.get(key) is not None for records in runs.values() for record in records for key in _REWARDS)
    loss = {f"Loss per {'preference' if of_pairs else 'token'}": {"train_loss": "training", "val_loss": "validation"}}
    drawn = []
    for title, names in (loss | _PLOTS).items():
        curves = [
            {
                "name": f"{run} {name}".strip(),
                "label": name if not run else run * (place == 0),
                "colour": number if run else place,
                "dots": key.startswith("val_"),
                "best": key == "val_loss",
                "points": points,
            }
            for number, (run, records) in enumerate(runs.items())
            for place, (key, name) in enumerate(names.items())
            if (points := _points(records, key))
        ]
        if curves:
            drawn.append({"title": title, "zero": not _FROM_ZERO.isdisjoint(names), "curves": curves})
    return drawn


def _points(metrics: Sequence[Record], key: str) -> list[tuple[int, float]]:
    # Six digits are more than a drawing shows.
    return [(record["iteration"], float(f"{record[key]:.6g}")) for record in metrics if record.get(key) is not None]


# How many rewarded answers a report shows.
_REWARDED = 30
_RELOAD_SECONDS = 5
# Reading them takes longer than to write a report.
_installed = cache(packages.versions)


@dataclass(frozen=True)
class Pictured:
    """A text in a cell of a table, behind images that are data URIs."""

    text: str
    pictures: Sequence[str]


@dataclass
class ReportTable:
    """A table of the report, with a note below its title; a cell is any value that str() can show.

    A click on its title shows or hides a `folded` table, which is `shown` at first or not.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    folded: bool = False
    shown: bool = False


def read_metrics(path: Path) -> tuple[list[Record], int]:
    """Return the records of a metrics.jsonl, and the number of lines that hold none, as one that was cut short."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = [_record(line) for line in lines]
    return [record for record in records if record is not None], records.count(None)


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "iteration" in record else None


def environment() -> dict[str, str]:
    """Describe the machine that runs this: Python, operating system, device and BLAS."""
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    return facts | backend.facts()


@dataclass(frozen=True)
class RunDescription:
    """The description of a run in its report, besides figures and options."""

    # The subjects of the run, by name: its model, trained parameters and data.
    about: dict[str, str]
    tables: Sequence[ReportTable] = ()
    # Figures to show before those of the result.
    headline: Mapping[str, str] = field(default_factory=dict)
    # The subject of training; the name of the model by default.
    title: str | None = None
    # How the run stands, in words.
    state: str = "ended"
    # Whether the run goes on, so that the page is to reload itself.
    running: bool = False
    # The images of each sample prompt as data URIs.
    thumbnails: Sequence[Sequence[str]] = ()
    # The lines to type next.
    commands: Sequence[str] = ()


def write_report(
    path: Path, metrics: Path, config: TrainConfig, result: dict[str, Any], description: RunDescription
) -> list[str]:
    """Write the report of a run from its metrics.jsonl, its options and the fields of its Result.

    Returns lines on the parts that the report lacks because `metrics` is damaged.
    """
    records, damaged = read_metrics(metrics)
    done = f"{result['iterations']:,} of {config.iters:,}"
    problems = []
    if damaged or not metrics.is_file():
        what = f"damaged lines in {metrics.name}: {damaged}" if damaged else f"{metrics.name} is missing"
        problems = [f"{what}; the curves show the records that are left: {len(records)}."]
    now = datetime.datetime.now().astimezone()
    facts = _installed() | environment()
    run = {"date": f"{now:%Y-%m-%d %H:%M %Z}", **description.about}
    done_part = {"part_done": result["iterations"] / max(config.iters, 1)} if description.running else {}
    text = render(
        f"{description.title or Path(config.model or '').name}: training report",
        {"": records},
        subtitle=f"{config.fine_tune_type}, {done} iterations of {config.batch_size:,} rows; {description.state}",
        headline={**description.headline, **_headline(result)},
        notes=problems,
        tables=[
            *rewarded_tables(records),
            *sample_tables(records, description.thumbnails),
            ReportTable("The run", ("what", "value"), list(run.items()), folded=True, shown=True),
            *description.tables,
            ReportTable("Versions and machine", ("what", "value"), [*facts.items()], folded=True),
        ],
        options=options_yaml(config),
        commands=description.commands,
        written=f"{now:%Y-%m-%d %H:%M:%S %Z}",
        **done_part,
    )
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    return problems


def sample_tables(records: Sequence[Record], thumbnails: Sequence[Sequence[str]] = ()) -> list[ReportTable]:
    """Return the tables of the answers in the records of a metrics.jsonl.

    The first has the first and the last answer to each prompt, with the prompt's images as data URIs. If there are
    more, a folded one has all of them.
    """
    answered = [(at, samples) for at, samples in _samples(records) if REWARD not in samples[0]]
    if not answered:
        return []
    first, before = answered[0]
    last, now = answered[-1]
    judges = any("expected" in sample for sample in now)
    olds = [sample["answer"] for sample in before] if len(answered) > 1 and len(before) == len(now) else []
    rows = []
    for number, sample in enumerate(now):
        pictures = thumbnails[number] if number < len(thumbnails) else ()
        row = [Pictured(sample["prompt"], pictures), *olds[number : number + 1], sample["answer"]]
        rows.append([*row, sample.get("expected"), is_right(sample)] if judges else row)
    columns = ["prompt", *[f"answer at {first:,}"] * bool(olds), f"answer at {last:,}"]
    columns += ["expected", "right"] if judges else []
    title = f"Samples: {tally(now)}" if judges else "Samples"
    tables = [ReportTable(title, columns, rows, folded=True, shown=True)]
    every = sorted((number, at, one["answer"]) for at, samples in answered for number, one in enumerate(samples, 1))
    if len(answered) > 2:
        tables.append(ReportTable(f"All {len(every):,} answers", ("sample", "iteration", "answer"), every, folded=True))
    return tables


def _samples(records: Sequence[Record]) -> list[tuple[int, list[Record]]]:
    """Return the answers of each record that has some, behind its iteration."""
    return [(record["iteration"], record[SAMPLES]) for record in records if record.get(SAMPLES)]


def rewarded_tables(records: Sequence[Record]) -> list[ReportTable]:
    """Return a table of the last answers that training has sampled, where the records have any, with their rewards."""
    rows: list[tuple[Any, ...]] = [
        (at, sample["prompt"], sample["answer"], sample[REWARD])
        for at, samples in _samples(records)
        for sample in samples
        if REWARD in sample
    ]
    columns: tuple[str, ...] = ("iteration", "prompt", "answer", REWARD)
    those = "The best, the middle and the worst answer"
    if not any(reward for *_, reward in rows):
        columns = columns[:-1]
        those = "Some answers"
    rows = [row[: len(columns)] for row in rows[-_REWARDED:]]
    note = f"{those} before each report; metrics.jsonl has all of them."
    return [ReportTable("Sampled answers", columns, rows, note, folded=True, shown=True)] if rows else []


def options_yaml(config: TrainConfig) -> str:
    """Return the options that differ from their defaults as YAML, with which `deltatune train -c` repeats the run."""
    changed = _changed(config)
    # A run that was given epochs has its number of iterations from them.
    left_out = ("resume", "iters") if config.epochs is not None else ("resume",)
    # Rows in memory and functions stand for themselves by their names.
    changed = json.loads(json.dumps({name: changed[name] for name in changed if name not in left_out}, default=str))
    return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True) if changed else ""


def _changed(options: Any) -> dict[str, Any]:
    changed = {}
    for name, default in vars(type(options)()).items():
        value = getattr(options, name)
        if value != default:
            # The name of data in memory is no plain text, which YAML alone can hold.
            value = str(value) if isinstance(value, str) else value
            changed[name] = _changed(value) if dataclasses.is_dataclass(value) else value
    return changed


def _headline(result: dict[str, Any]) -> dict[str, str]:
    def number(name: str, form: str) -> str:
        value = result[name]
        return "–" if value is None else format(value, form)

    seconds = result["seconds"]
    return {
        "training loss": number("train_loss", ".4f"),
        "validation loss": number("val_loss", ".4f"),
        "tokens per second": number("tokens_per_second", ",.0f"),
        "peak memory": "–" if result["peak_memory"] is None else gigabytes(result["peak_memory"]),
        "training time": f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min",
    }


def render(title: str, runs: Mapping[str, Sequence[Record]], **parts: Any) -> str:
    """Return the HTML page, with curves of the runs' records as in plots().

    `parts` are any of its other parts (report.html): `subtitle`; `headline`, figures by name; `notes`; `commands` to
    type next; `tables`, of which folded ones come below the curves; `options` as YAML; when it was `written`; and
    `part_done` of the iterations of a run that goes on, with which the page reloads itself.
    """
    return _page().render(title=title, plots=plots(runs), **parts)


@cache
def _page() -> jinja2.Template:
    """Return the template of the page. To compile it takes longer than to write a report."""
    folder = Path(__file__).parent
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    # The page runs this script and no other, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, loader=jinja2.FileSystemLoader(folder))
    pages.filters["cell"] = shown
    pages.globals |= {"style": style, "script": script, "policy": policy, "reload": _RELOAD_SECONDS}
    return pages.get_template("report.html")


def shown(value: Any) -> str:
    """Return the text of a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"
    return value.text if isinstance(value, Pictured) else str(value)


COLUMNS = ("folder", "date", "model", "data", "rate", "iterations", "best loss")
# A report holds the options of its run in this element (report.html).
_OPTIONS = re.compile(r"<pre id=options>(.*?)</pre>", re.DOTALL)
_METRICS = ("metrics.jsonl", "*/metrics.jsonl", "*/*/metrics.jsonl")
# The options on which the learning rate depends.
_OF_RATE = ("learning_rate", "fine_tune_type", "from_scratch", "loss")


@dataclass(frozen=True)
class PastRun:
    """A run, as its files show it: options that differ from their defaults are none where its report is missing."""

    folder: Path
    records: Sequence[Record]
    options: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> PastRun:
        """Read the files of the run in a folder."""
        report = folder / "report.html"
        written = _OPTIONS.search(report.read_text(encoding="utf-8", errors="replace")) if report.is_file() else None
        options = yaml.safe_load(html.unescape(written[1])) if written else {}
        return cls(folder, read_metrics(folder / "metrics.jsonl")[0], options)

    def row(self) -> tuple[Any, ...]:
        """Return the cells of COLUMNS: the loss is the lowest one of validation, or the last one of training."""
        training = self._losses("train_loss")
        best = min(self._losses("val_loss"), default=training[-1] if training else None)
        date = datetime.datetime.fromtimestamp((self.folder / "metrics.jsonl").stat().st_mtime)
        done = max((record["iteration"] for record in self.records), default=0)
        data = self.options.get("data") or self.options.get("hf_dataset")
        named = {name: self.options[name] for name in _OF_RATE if name in self.options}
        rate = TrainConfig(**named).learning_rate if self.options else None
        return self.folder, f"{date:%Y-%m-%d %H:%M}", self.options.get("model"), data, rate, done, best

    def _losses(self, name: str) -> list[float]:
        return [record[name] for record in self.records if record.get(name) is not None]


def find(folders: Sequence[str]) -> list[PastRun]:
    """Return the runs in folders and two floors below them, the oldest first; a folder without any is a UserError."""
    parents: dict[Path, None] = {}
    for folder in folders:
        files = [file for pattern in _METRICS for file in Path(folder).glob(pattern)]
        if not files:
            raise UserError(
                f"{folder}: no run is there: expected a folder with metrics.jsonl, as --adapter-path has it."
            )
        parents |= dict.fromkeys(file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime))
    return [PastRun.read(folder) for folder in parents]


def write_comparison(path: Path, runs: Sequence[PastRun]) -> None:
    """Write a report with the curves of several runs, and the options in which they differ."""
    last = [run.folder.name for run in runs]
    names = [name if last.count(name) == 1 else str(run.folder) for name, run in zip(last, runs, strict=True)]
    options = {name: None for run in runs for name in run.options}
    values = {name: [str(run.options.get(name, "–")) for run in runs] for name in options}
    rows = [(name, *cells) for name, cells in values.items() if len(set(cells)) > 1]
    page = render(
        f"{len(runs):,} runs",
        {name: run.records for name, run in zip(names, runs, strict=True)},
        subtitle="Lines are the loss of training, dots that of validation.",
        tables=[
            ReportTable("Runs", COLUMNS, [run.row() for run in runs]),
            ReportTable("Options in which they differ", ("option", *names), rows),
        ],
    )
    write(path, page.encode())
