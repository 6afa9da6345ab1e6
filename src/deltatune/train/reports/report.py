"""Writes a run's report as one HTML page, which loads nothing from elsewhere and in which all text is escaped.

While the run goes on, the page reloads itself. Its curves are drawn in the browser (report.js) from points that stand
in the page.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import html
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...machine import backend, packages
from ...options.config import TrainConfig
from ..saved.state import write_atomically
from .columns import gigabytes
from .log import SAMPLES


@dataclass(frozen=True)
class Curve:
    """One curve of a plot.

    Attributes:
        key: The name of its values in a record of metrics.jsonl.
        name: Its name in the legend; empty for none.
        mark: The page's colour for it, `a` or `b`.
        dots: Whether every point gets a dot.
    """

    key: str
    name: str = ""
    mark: str = "a"
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """One set of axes.

    Attributes:
        title: Its heading.
        curves: The curves that it shows where a run has values for them.
        zero: Whether the y axis starts at 0 or below, so that it is linear until the reader chooses otherwise.
    """

    title: str
    curves: Sequence[Curve]
    zero: bool = False


def _both(key: str, validation: str) -> list[Curve]:
    return [Curve(key, "training"), Curve(validation, "validation", "b", dots=True)]


_REWARDS = ("rewards/chosen", "rewards/rejected")
_PLOTS = (
    Plot("Reward of sampled answers", [Curve("reward", "mean"), Curve("reward_std", "deviation", "b")]),
    Plot("Share of exact answers", [Curve("rewards/exact")], zero=True),
    Plot("Tokens of an answer", [Curve("completions/mean_length")], zero=True),
    Plot("Entropy of a sampled token", [Curve("entropy")], zero=True),
    Plot("Divergence from the reference", [Curve("kl")], zero=True),
    Plot(
        "Difference between sampler and training, in nats",
        [
            Curve("sampling/sampling_logp_difference/mean", "mean"),
            Curve("sampling/sampling_logp_difference/max", "largest", "b"),
        ],
    ),
    Plot("Seconds of a sampling", [Curve("seconds/sampling", "answers"), Curve("seconds/rewards", "rewards", "b")]),
    Plot("Rewards", [Curve(_REWARDS[0], "chosen"), Curve(_REWARDS[1], "rejected", "b")]),
    Plot("Margin of the chosen answer's reward", _both("rewards/margins", "val_rewards/margins")),
    Plot(
        "Share of pairs whose chosen answer has the larger reward",
        _both("rewards/accuracies", "val_rewards/accuracies"),
    ),
    Plot("Gradient norm, before clipping", [Curve("grad_norm")]),
    Plot("Learning rate", [Curve("learning_rate")], zero=True),
    Plot("Tokens per second", [Curve("tokens_per_second")], zero=True),
    Plot("Peak memory, GB", [Curve("peak_memory")], zero=True),
    Plot("Load-balancing loss of the routers", [Curve("aux_loss")]),
    Plot("z-loss of the routers", [Curve("z_loss")]),
)


def plots(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plots for which the records of a metrics.jsonl hold values, as report.js takes them.

    Returns:
        For each plot its `title`, `zero` and `curves`; for each of these `name`, `mark`, `dots` and `points`, which are
        pairs of an iteration and a value.
    """
    of_pairs = any(record.get(key) is not None for record in metrics for key in _REWARDS)
    loss = Plot(f"Loss per {'preference' if of_pairs else 'token'}", _both("train_loss", "val_loss"))
    drawn = []
    for plot in (loss, *_PLOTS):
        curves = [
            {"name": curve.name, "mark": curve.mark, "dots": curve.dots, "points": points}
            for curve in plot.curves
            if (points := _points(metrics, curve.key))
        ]
        if curves:
            drawn.append({"title": plot.title, "zero": plot.zero, "curves": curves})
    return drawn


def _points(metrics: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    # Six digits are more than a drawing shows.
    return [(record["iteration"], float(f"{record[key]:.6g}")) for record in metrics if record.get(key) is not None]


Row = Sequence[Any]
# No figure of a run is larger; sums of larger ones could overflow in a plot.
_LARGEST = 1e100
_STYLE = Path(__file__).with_name("report.css")
_SCRIPT = Path(__file__).with_name("report.js")
_RELOADED_EVERY_SECONDS = 5


@dataclass
class ReportTable:
    """A table of the report.

    Attributes:
        title: Its heading.
        columns: The headings of its columns.
        rows: Its rows; a cell is any value that str() can show.
        note: A text below the heading.
        folded: Whether a click on its heading shows or hides the table.
        shown: Whether a folded table is shown at first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    folded: bool = False
    shown: bool = False


@dataclass
class RunReport:
    """The content of a report.

    Attributes:
        title: Its heading.
        subtitle: The line below the heading.
        headline: The figures at the top, by name.
        notes: Sentences below the headline, on parts that the report lacks.
        metrics: The records of metrics.jsonl, which are drawn as curves.
        tables: The tables in order; folded ones come below the curves, the others above.
        part_done: The part of the iterations that is done, while the run goes on; the page then reloads itself.
        written: When the report was written.
    """

    title: str
    subtitle: str = ""
    headline: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    metrics: Sequence[dict[str, Any]] = ()
    tables: Sequence[ReportTable] = ()
    part_done: float | None = None
    written: str = ""


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the records of a metrics.jsonl that may be damaged.

    Returns:
        The records, in which every value but the samples is a finite number or None, and the number of lines that hold
        no such record.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = [parse_record(line) for line in lines]
    return [record for record in records if record is not None], records.count(None)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of a metrics.jsonl, or None if it holds none."""
    try:
        record = json.loads(line)
    # A deeply nested line exhausts the parser's recursion.
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("iteration") is None:
        return None
    sound = all(
        _answers(value) if name == SAMPLES else value is None or _drawable(value) for name, value in record.items()
    )
    return record if sound else None


def _answers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(sample, dict)
        and {name: type(text) for name, text in sample.items()} == {"prompt": str, "answer": str}
        for sample in value
    )


def _drawable(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def environment() -> dict[str, str]:
    """Describe the machine that runs this: Python, operating system, device and BLAS."""
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    return facts | backend.facts()


@dataclass(frozen=True)
class RunDescription:
    """The description of a run in its report, besides figures and options.

    Attributes:
        about: The subjects of the run, by name: its model, trained parameters and data.
        tables: Tables to show before those of the options.
        headline: Figures to show before those of the result.
        title: The subject of training; the name of the model by default.
        state: How the run stands, in words.
        running: Whether the run goes on, so that the page is to reload itself.
    """

    about: dict[str, str]
    tables: Sequence[ReportTable] = ()
    headline: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None
    state: str = "ended"
    running: bool = False


def write_report(
    path: Path,
    metrics: Path,
    config: TrainConfig,
    result: dict[str, Any],
    description: RunDescription,
) -> list[str]:
    """Write the report of a run.

    Args:
        path: The HTML file to write.
        metrics: The run's metrics.jsonl.
        config: The options of the run.
        result: The fields of its Result.
        description: The description of the run, besides figures and options.

    Returns:
        Lines on the parts that the report lacks because `metrics` is damaged.

    Raises:
        UserError: If the file system refuses.
    """
    records, damaged = read_metrics(metrics)
    done = f"{result['iterations']:,} of {config.iters:,}"
    problems = []
    if damaged or not metrics.is_file():
        what = f"damaged lines in {metrics.name}: {damaged}" if damaged else f"{metrics.name} is missing"
        problems = [f"{what}; the curves show the records that are left: {len(records)}."]
    now = datetime.datetime.now().astimezone()
    run = {"date": f"{now:%Y-%m-%d %H:%M %Z}", **description.about}
    report = RunReport(
        title=f"{description.title or Path(config.model or '').name}: training report",
        subtitle=f"{config.fine_tune_type}, {done} iterations of {config.batch_size:,} rows; {description.state}",
        headline={**description.headline, **_headline(result)},
        notes=problems,
        metrics=records,
        tables=[
            *sample_tables(records),
            ReportTable("The run", ("what", "value"), list(run.items()), folded=True, shown=True),
            *description.tables,
            *_facts(config),
        ],
        part_done=result["iterations"] / max(config.iters, 1) if description.running else None,
        written=f"{now:%Y-%m-%d %H:%M:%S %Z}",
    )
    text = render(report)
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    return problems


def _facts(config: TrainConfig) -> list[ReportTable]:
    """Return the tables of the options and of the machine."""
    return [
        ReportTable(
            "Options that differ from their defaults",
            ("option", "value"),
            changed_options(config),
            folded=True,
            shown=True,
        ),
        ReportTable(
            "Versions and machine", ("what", "value"), list((packages.versions() | environment()).items()), folded=True
        ),
    ]


def sample_tables(records: Sequence[dict[str, Any]]) -> list[ReportTable]:
    """Return the tables of the answers in the records of a metrics.jsonl: one for each prompt.

    Each shows the first answer and the last. If there are more, a folded table has all of them.
    """
    answers: dict[tuple[int, str], list[Row]] = {}
    for record in records:
        for number, sample in enumerate(record.get(SAMPLES, ()), 1):
            answers.setdefault((number, sample["prompt"]), []).append((record["iteration"], sample["answer"]))
    tables, columns = [], ("iteration", "answer")
    for (number, prompt), rows in answers.items():
        title = f"Sample {number}"
        ends = rows if len(rows) < 3 else [rows[0], rows[-1]]
        tables.append(ReportTable(title, columns, ends, note=prompt, folded=True, shown=True))
        if len(rows) > 2:
            tables.append(ReportTable(f"{title}: all {len(rows):,} answers", columns, rows, folded=True))
    return tables


def changed_options(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the name and the value of every option that differs from its default, those inside options too."""
    changed: list[tuple[str, Any]] = []
    for name, default in vars(type(config)()).items():
        value = getattr(config, name)
        if value == default:
            continue
        if dataclasses.is_dataclass(value):
            changed += changed_options(value, f"{prefix}{name}.")
        else:
            changed.append((prefix + name, value))
    return changed


def _headline(result: dict[str, Any]) -> dict[str, str]:
    def number(name: str, form: str) -> str:
        value = result[name]
        return "–" if value is None else format(value, form)

    return {
        "training loss": number("train_loss", ".4f"),
        "validation loss": number("val_loss", ".4f"),
        "tokens per second": number("tokens_per_second", ",.0f"),
        "peak memory": "–" if result["peak_memory"] is None else gigabytes(result["peak_memory"]),
        "training time": _minutes(result["seconds"]),
    }


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def render(report: RunReport) -> str:
    """Return the HTML page."""
    style, script = _STYLE.read_text(encoding="utf-8"), _SCRIPT.read_text(encoding="utf-8")
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f'<meta http-equiv=Content-Security-Policy content="{_policy(script)}">'
        + (f"<meta http-equiv=refresh content={_RELOADED_EVERY_SECONDS}>" if report.part_done is not None else "")
        + f"<title>{html.escape(report.title)}</title><style>{style}</style></head><body><main>"
        f"<header><h1>{html.escape(report.title)}</h1><p>{html.escape(report.subtitle)}</p>"
        + (f"<progress value={report.part_done:.4f}></progress>" if report.part_done is not None else "")
        + f"</header>{_cards(report.headline)}"
        + "".join(f"<p class=note>{html.escape(note[0].upper() + note[1:])}</p>" for note in report.notes)
        + "".join(_table(table) for table in report.tables if not table.folded)
        + _figures(report)
        + "".join(_folded(table) for table in report.tables if table.folded)
        + f"<footer>{html.escape(', '.join(filter(None, ('deltatune', report.written))))}</footer></main>"
        f"<script>{script}</script></body></html>\n"
    )


def _policy(script: str) -> str:
    """Return a content security policy under which the page runs `script` and no other, and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _cards(headline: Mapping[str, str]) -> str:
    cards = "".join(
        f"<div class=card><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in headline.items()
    )
    rows = -(-len(headline) // 6) or 1
    across = -(-len(headline) // rows)
    return f"<section class=cards style=--across:{across}>{cards}</section>"


def _figures(report: RunReport) -> str:
    """Return the place of the curves, which report.js fills, and their points."""
    drawn = plots(report.metrics)
    # Inside a script element, "</script" ends the text wherever it stands.
    points = json.dumps(drawn).replace("<", "\\u003c")
    data = f"<script type=application/json id=curves>{points}</script>"
    if drawn:
        scriptless = "<noscript><p class=note>The curves are drawn by a script, and scripts are off.</p></noscript>"
        return f"<section class=figures id=figures></section>{scriptless}{data}"
    begins = "The curves begin with the first report of the training loss."
    empty = f"<p class=empty>{begins}</p>" if report.part_done is not None else ""
    return f"<section id=figures>{empty}</section>{data}"


def _table(table: ReportTable) -> str:
    return f"<section><h2>{html.escape(table.title)}</h2>{_noted(table)}</section>"


def _folded(table: ReportTable) -> str:
    return f"<details{' open' * table.shown}><summary>{html.escape(table.title)}</summary>{_noted(table)}</details>"


def _noted(table: ReportTable) -> str:
    return (f"<p class=note>{html.escape(table.note)}</p>" if table.note else "") + _grid(table)


def _grid(table: ReportTable) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in table.rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return f"<td>{ {True: 'yes', False: 'no', None: '–'}[value] }</td>"
    if isinstance(value, int | float):
        return f"<td class=number>{value:,.6g}</td>" if isinstance(value, float) else f"<td class=number>{value:,}</td>"
    return f"<td>{html.escape(str(value))}</td>"
