"""`deltatune runs` lists runs, and lays several of them in one report."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..machine import startup

HELP = "list the runs in folders, or lay several in one report"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="*", default=["."], metavar="FOLDER", help="folder of runs (default: this one)"
    )
    parser.add_argument("--report", metavar="FILE", help="write a report with the curves of all of them into this file")


def run(arguments: argparse.Namespace) -> int:
    """List the runs, write their report if one is asked for, and return exit code 0."""
    startup.leave_torch_out()
    from ..train.reports.report import COLUMNS, find, shown, write_comparison

    runs = find(arguments.folders)
    rows = [COLUMNS, *(tuple(map(shown, run.row())) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if arguments.report:
        write_comparison(Path(arguments.report), runs)
        print(f"Report: {arguments.report}")
    return 0
