"""Writes a run's report as one HTML page, which loads nothing from elsewhere and in which all text is escaped.

While the run goes on, the page reloads itself. Its curves are drawn in the browser (report.js) from points that stand
in the page.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from ...machine import backend, packages
from ...options.config import TrainConfig
from ..saved.state import write_atomically
from .columns import gigabytes
from .log import REWARD, SAMPLES, Record, is_right, tally


class Curve(NamedTuple):
    """One curve of a plot.

    Attributes:
        key: The name of its values in a record of metrics.jsonl.
        name: Its name; empty where it is the only one.
        dots: Whether every point gets a dot, and the lowest one a mark.
    """

    key: str
    name: str = ""
    dots: bool = False


class Plot(NamedTuple):
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
    return [Curve(key, "training"), Curve(validation, "validation", dots=True)]


_REWARDS = ("rewards/chosen", "rewards/rejected")
_PLOTS = (
    Plot("Reward of sampled answers", [*_both("reward", "val_reward"), Curve("reward_std", "deviation")]),
    Plot("Share of exact answers", _both("rewards/exact", "val_rewards/exact"), zero=True),
    Plot("Tokens of an answer", _both("completions/mean_length", "val_completions/mean_length"), zero=True),
    Plot("Entropy of a sampled token", [Curve("entropy")], zero=True),
    Plot("Divergence from the reference", [Curve("kl")], zero=True),
    Plot(
        "Difference between sampler and training, in nats",
        [
            Curve("sampling/sampling_logp_difference/mean", "mean"),
            Curve("sampling/sampling_logp_difference/max", "largest"),
        ],
    ),
    Plot("Seconds of a sampling", [Curve("seconds/sampling", "answers"), Curve("seconds/rewards", "rewards")]),
    Plot("Rewards", [Curve(_REWARDS[0], "chosen"), Curve(_REWARDS[1], "rejected")]),
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


def plots(runs: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """Return the plots for which the records of runs hold values, as report.js takes them.

    Args:
        runs: The records of each run's metrics.jsonl, by its name, which is empty where there is one run alone.

    Returns:
        For each plot its `title`, `zero` and `curves`; for each of these its `name`, the `label` at its end, the number
        of its colour, `dots`, `best` for the loss of validation, and `points`: pairs of an iteration and a value.
    """
    of_pairs = any(record.get(key) is not None for records in runs.values() for record in records for key in _REWARDS)
    loss = Plot(f"Loss per {'preference' if of_pairs else 'token'}", _both("train_loss", "val_loss"))
    drawn = []
    for plot in (loss, *_PLOTS):
        curves = [
            {
                "name": f"{run} {curve.name}".strip(),
                "label": curve.name if not run else run * (place == 0),
                "colour": number if run else place,
                "dots": curve.dots,
                "best": curve.key == "val_loss",
                "points": points,
            }
            for number, (run, records) in enumerate(runs.items())
            for place, curve in enumerate(plot.curves)
            if (points := _points(records, curve.key))
        ]
        if curves:
            drawn.append({"title": plot.title, "zero": plot.zero, "curves": curves})
    return drawn


def _points(metrics: Sequence[Record], key: str) -> list[tuple[int, float]]:
    # Six digits are more than a drawing shows.
    return [(record["iteration"], float(f"{record[key]:.6g}")) for record in metrics if record.get(key) is not None]


# No figure of a run is larger; sums of larger ones could overflow in a plot.
_LARGEST = 1e100
# How many rewarded answers a report shows.
_REWARDED = 30
_RELOAD_SECONDS = 5


@dataclass(frozen=True)
class Pictured:
    """A text in a cell of a table, behind images that are data URIs."""

    text: str
    pictures: Sequence[str]


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
    rows: Sequence[Sequence[Any]]
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
        runs: The records of a metrics.jsonl, which are drawn as curves, by the name of the run; "" for one run alone.
        tables: The tables in order; folded ones come below the curves, the others above.
        options: The options of the run as YAML.
        commands: The lines to type next.
        part_done: The part of the iterations that is done, while the run goes on; the page then reloads itself.
        written: When the report was written.
    """

    title: str
    subtitle: str = ""
    headline: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    runs: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    tables: Sequence[ReportTable] = ()
    options: str = ""
    commands: Sequence[str] = ()
    part_done: float | None = None
    written: str = ""


def read_metrics(path: Path) -> tuple[list[Record], int]:
    """Read the records of a metrics.jsonl that may be damaged.

    Returns:
        The records, in which every value but the samples is a finite number or None, and the number of lines that hold
        no such record.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = [parse_record(line) for line in lines]
    return [record for record in records if record is not None], records.count(None)


def parse_record(line: bytes) -> Record | None:
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
        and {"prompt", "answer"} <= sample.keys() <= {"prompt", "answer", "expected", REWARD}
        and all(isinstance(text, str) for text in sample.values())
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
        thumbnails: The images of each sample prompt as data URIs.
        commands: The lines to type next.
    """

    about: dict[str, str]
    tables: Sequence[ReportTable] = ()
    headline: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None
    state: str = "ended"
    running: bool = False
    thumbnails: Sequence[Sequence[str]] = ()
    commands: Sequence[str] = ()


def write_report(
    path: Path, metrics: Path, config: TrainConfig, result: dict[str, Any], description: RunDescription
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
    facts = packages.versions() | environment()
    run = {"date": f"{now:%Y-%m-%d %H:%M %Z}", **description.about}
    report = RunReport(
        title=f"{description.title or Path(config.model or '').name}: training report",
        subtitle=f"{config.fine_tune_type}, {done} iterations of {config.batch_size:,} rows; {description.state}",
        headline={**description.headline, **_headline(result)},
        notes=problems,
        runs={"": records},
        tables=[
            *rewarded_tables(records),
            *sample_tables(records, description.thumbnails),
            ReportTable("The run", ("what", "value"), list(run.items()), folded=True, shown=True),
            *description.tables,
            ReportTable("Versions and machine", ("what", "value"), [*facts.items()], folded=True),
        ],
        options=options_yaml(config),
        commands=description.commands,
        part_done=result["iterations"] / max(config.iters, 1) if description.running else None,
        written=f"{now:%Y-%m-%d %H:%M:%S %Z}",
    )
    text = render(report)
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    return problems


def sample_tables(records: Sequence[Record], thumbnails: Sequence[Sequence[str]] = ()) -> list[ReportTable]:
    """Return the tables of the answers in the records of a metrics.jsonl.

    The first has the first and the last answer to each prompt. If there are more, a folded one has all of them.

    Args:
        records: The records.
        thumbnails: The images of each prompt as data URIs.
    """
    answered = [(at, samples) for at, samples in _samples(records) if REWARD not in samples[0]]
    if not answered:
        return []
    (first, before), (last, now) = answered[0], answered[-1]
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
    columns = ("iteration", "prompt", "answer", REWARD)
    note = "Some answers before each report; metrics.jsonl has all of them."
    if any(reward for *_, reward in rows):
        note = "The best, the middle and the worst answer before each report; metrics.jsonl has all of them."
    else:
        rows, columns = [row[:-1] for row in rows], columns[:-1]
    return [ReportTable("Sampled answers", columns, rows[-_REWARDED:], note, folded=True, shown=True)] if rows else []


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


def render(report: RunReport) -> str:
    """Return the HTML page."""
    folder = Path(__file__).parent
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    # The page runs this script and no other, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, loader=jinja2.FileSystemLoader(folder))
    pages.filters["cell"] = shown
    page = pages.get_template("report.html")
    return page.render(
        report=report, plots=plots(report.runs), style=style, script=script, policy=policy, reload=_RELOAD_SECONDS
    )


def shown(value: Any) -> str:
    """Return the text of a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"
    return value.text if isinstance(value, Pictured) else str(value)
