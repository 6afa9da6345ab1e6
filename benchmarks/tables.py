"""Prints files of results as Markdown tables, so that no figure is typed by hand.

usage: python benchmarks/tables.py RESULTS.json [...]

Files of gated_delta.py are read as one result: a run of one implementation can follow a run of another.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

BASE = "FLA Triton"
MARK = "†"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cpu_table(workers: list[Any]) -> str:
    ours = next((worker for worker in workers if worker.name == "deltatune chunk"), None)
    header = ["implementation", "forward, ms", "forward + backward, ms", "over ours", "CPU, ms", "peak, MB"]
    rows = []
    for worker in workers:
        error = f"{worker.error:.1e}"
        if not worker.agrees():
            rows.append([worker.name, "not timed", "not timed", "", "", "", f"{error}: wrong"])
            continue
        forward, both, used = (statistics.median(times) * 1e3 for times in worker.times.values())
        ratio = f"{both / 1e3 / statistics.median(ours.times['backward']):.1f}x" if ours else "-"
        peak = "-" if worker.peak is None else f"{worker.peak / 1e6:.0f}"
        rows.append([worker.name, f"{forward:.1f}", f"{both:.1f}", ratio, f"{used:.0f}", peak, error])
    return markdown([*header, "error to float64"], rows)


def line(record: dict[str, Any]) -> str:
    """One record as a line for the terminal."""
    where = f"{record['implementation']}, {record['size']['name']}"
    if "as_called" not in record:
        return f"{where}: {record.get('failed') or 'not run: ' + record['skipped']}"
    row = "in a row, none" if "in_a_row" not in record else f"in a row {ms(record['in_a_row'])} ({record['how']})"
    mark = " (a time only: FLA refuses this backward pass here)" if record["times_only"] else ""
    called = f"as called {ms(record['as_called'])} ms (of {record['calls']})"
    return (
        f"{where}: {called}, {row}, forward {ms(record['forward'])}, first {record['first']:.1f} s, "
        f"{megabytes(record)} MB over inputs and gradients, error {worst(record)}{mark}"
    )


def ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def megabytes(record: dict[str, Any]) -> str:
    return f"{record['excess'] / 1e6:,.0f}"


def worst(record: dict[str, Any]) -> str:
    name = max(record["errors"], key=lambda name: record["errors"][name])
    return f"{record['errors'][name]:.1e} ({name})"


def about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{result['date']}; {machine['gpu'] or 'no GPU'}; {machine['cpu']}; {result['versions']}."


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """The results in these files, those of gated_delta.py joined into one."""
    results = [json.loads(path.read_text()) for path in paths]
    rule = [result for result in results if result["what"] == "gated_delta"]
    return [*([joined(rule)] if rule else []), *(result for result in results if result["what"] != "gated_delta")]


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several: all their sizes and records; where two have the same record, that of the later file."""

    def named(*keys: str) -> str:
        """What the results have under these keys, each different text once."""
        found = []
        for result in results:
            value: Any = result
            for key in keys:
                value = value[key]
            found += [value] if value and value not in found else []
        return " / ".join(found)

    def sizes(which: str) -> list[dict[str, Any]]:
        return list({size["name"]: size for result in results for size in result[which]}.values())

    records = {
        (record["implementation"], record["size"]["name"]): record for result in results for record in result["records"]
    }
    ran = {name for name, _ in records}
    missing = {name: modules for result in results for name, modules in result.get("missing", {}).items()}
    return {
        "what": "gated_delta",
        "date": named("date"),
        "machine": {"gpu": named("machine", "gpu"), "cpu": named("machine", "cpu")},
        "versions": named("versions"),
        "table": sizes("table"),
        "sweep": sizes("sweep"),
        "missing": {name: modules for name, modules in missing.items() if name not in ran},
        "records": list(records.values()),
    }


def gated_delta_tables(result: dict[str, Any]) -> str:
    """A table for each measured size, and a list of what was not run, with reasons."""
    parts = [about(result)]
    marked = False
    for size in result["table"]:
        here = [record for record in result["records"] if record["size"]["name"] == size["name"]]
        timed = [record for record in here if "as_called" in record]
        marked = marked or any(record["times_only"] for record in timed)
        if not here:
            continue
        base = next((record for record in timed if record["implementation"].startswith(BASE)), None)
        parts += [f"**{size['name']}**", _of_size(timed, base)]
        parts += [_left_out(here)] if len(timed) < len(here) else []
    if missing := result.get("missing"):
        parts.append(f"Not installed: {', '.join(missing)}.")
    if marked:
        parts.append(
            f"{MARK} A time only: FLA refuses this backward pass on Hopper with Triton 3.4 to 3.7.0, since its "
            "gradients come out wrong there. That check was passed over for the time's sake."
        )
    return "\n\n".join(parts)


def _of_size(timed: list[dict[str, Any]], base: dict[str, Any] | None) -> str:
    header = ["implementation", "as called, ms", "of FLA's", "in a row, ms", "forward, ms"]
    header += ["MB over inputs and gradients", "error to float64, norm"]
    rows = []
    for record in timed:
        ratio = f"{record['as_called'] / base['as_called']:.2f}" if base else "-"
        name = record["implementation"] + (f" {MARK}" if record["times_only"] else "")
        row = ms(record["in_a_row"]) if "in_a_row" in record else "-"
        rows.append([name, ms(record["as_called"]), ratio, row, ms(record["forward"]), megabytes(record)])
        rows[-1].append(worst(record) + ("" if record["agrees"] else ": wrong"))
    return markdown(header, rows)


def _left_out(here: list[dict[str, Any]]) -> str:
    reasons = [
        f"{record['implementation']}: {record.get('failed') or record['skipped']}"
        for record in here
        if "as_called" not in record
    ]
    return "Not timed: " + "; ".join(reasons) + "."


def training_table(result: dict[str, Any]) -> str:
    """A table of tokens a second, peak memory and time to the first step, by trainer."""
    header = ["trainer", "tok/s", "ms a step", "peak, GB", "first step after, s", "loss"]
    rows, notes = [], []
    for record in result["records"]:
        if "step" not in record:
            notes.append(f"{record['trainer']}: {record['failed']}")
            continue
        row = [record["trainer"], f"{record['tokens'] / record['step']:,.0f}", ms(record["step"])]
        peak = "-" if record["peak"] is None else f"{record['peak'] / 1e9:.1f}"
        rows.append([*row, peak, f"{record['first']:.1f}", f"{record['losses'][0]:.3f}"])
    parts = [about(result), result["shape"], markdown(header, rows)]
    return "\n\n".join(parts + (["Not measured: " + "; ".join(notes) + "."] if notes else []))


FORMATS = {"gated_delta": gated_delta_tables, "training_step": training_table}


def main() -> None:
    for result in read([Path(path) for path in sys.argv[1:]]):
        print(FORMATS[result["what"]](result) + "\n")


if __name__ == "__main__":
    main()
