"""`deltatune watch FOLDER` shows a run in a browser, while it trains or afterwards."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from ..errors import UserError


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "watch",
        help="show a run in a browser, while it trains or afterwards",
        description="Serve a page with a run's curves, samples and figures on this machine alone, until Ctrl-C.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the run's --adapter-path")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port of the page (default: a free one)")
    parser.set_defaults(call=run, parser=parser)


def port(text: str) -> int:
    """Return the number of a port."""
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C and return exit code 0."""
    from ..train.reports.live import LivePage, trains

    folder = Path(arguments.folder)
    if not (folder / "report.html").is_file():
        raise UserError(f"watch: {folder} holds no run (no report.html); give the --adapter-path of one.")
    with LivePage(folder, lambda: trains(folder), arguments.port) as page:
        print(f"Live: {page.address}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print(flush=True)
    return 0
