"""Shows a run in a browser while it trains: a page on this machine alone, with a token in its address."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ...errors import UserError
from .report import STYLE, described, parse_record

_PAGE = Path(__file__).with_name("live_page.html")
# How many bytes before a place in metrics.jsonl say whether they are the same as when the page last asked.
_MARKED = 256
# A page that asked in the last seconds is open, and is waited for at the end; pages ask every two.
_OPEN, _WAIT = 5.0, 2.5
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LivePage:
    """Serves the page of one run on 127.0.0.1 while its `with` block lasts.

    It answers GET for two addresses, the page and its data, both behind a token that only its address has. Nothing else
    is served, whatever path is asked for. A Host other than its own is refused, so that a web site whose name leads to
    127.0.0.1 reads nothing.

    Args:
        folder: The output folder of the run.
        running: Tells whether the run goes on.
        port: The port; 0 for a free one.

    Raises:
        UserError: On entering, if the port is taken.
    """

    def __init__(self, folder: Path, running: Callable[[], bool], port: int = 0):
        self._folder, self._running, self._port = folder, running, port
        self._token = secrets.token_urlsafe(16)
        self._asked, self._closing = 0.0, False
        self._told_end = threading.Event()

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self._server.server_port}/{self._token}/"

    def __enter__(self) -> LivePage:
        page = self

        class Handler(_Handler):
            live = page

        try:
            self._server = _Server(("127.0.0.1", self._port), Handler)
        except OSError as error:
            raise UserError(
                f"--port {self._port}: {error.strerror or error}; choose another, or leave it out."
            ) from error
        threading.Thread(target=self._server.serve_forever, name="deltatune live", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        if time.monotonic() - self._asked < _OPEN:
            # The page that is open gets the last figures.
            self._told_end.wait(_WAIT)
        self._server.shutdown()
        self._server.server_close()

    def admits(self, host: str | None, token: str) -> bool:
        """Tell whether a request names this server and its token."""
        port = self._server.server_port
        known = host in (f"127.0.0.1:{port}", f"localhost:{port}")
        return hmac.compare_digest(token.encode(), self._token.encode()) and known

    def data(self, mark: str) -> dict[str, Any]:
        """Return what the page does not have yet.

        Args:
            mark: What the last answer gave: up to where in metrics.jsonl the page has read.

        Returns:
            The records from there on, or all of them with `reset` where the file is no longer what was read; the next
            `mark`; what the run is; and whether it goes on.
        """
        running = not self._closing and self._running()
        start, new, next_mark = _since(self._folder / "metrics.jsonl", mark)
        records = [parse_record(line) for line in new.splitlines()]
        run = described(self._folder / "report.html")
        self._asked = time.monotonic()
        if not running:
            self._told_end.set()
        return {
            "records": [record for record in records if record is not None],
            "reset": start == 0,
            "mark": next_mark,
            "iterations": run.pop("iterations", 0),
            "about": run,
            "running": running,
        }


def _since(path: Path, mark: str) -> tuple[int, bytes, str]:
    """Return the place from which a file is new to the holder of a mark, its whole lines from there, and the next mark.

    Only what is new is read, and the bytes before it that the mark tells of. The place is 0 where these are others.
    """
    at = _place(mark)
    try:
        with path.open("rb") as file:
            file.seek(max(0, at - _MARKED))
            before = file.read(min(at, _MARKED))
            if _mark(at, before) != mark or len(before) < min(at, _MARKED):
                at, before = 0, b""
                file.seek(0)
            new = file.read()
    except OSError:
        at, before, new = 0, b"", b""
    new = new[: new.rfind(b"\n") + 1]
    return at, new, _mark(at + len(new), (before + new)[-_MARKED:])


def _mark(size: int, last: bytes) -> str:
    """Return the mark of the first `size` bytes of a file, the last _MARKED of which are `last`."""
    return f"{size}-{zlib.crc32(last):08x}"


def _place(mark: str) -> int:
    """Return the place that a mark names, 0 if it is none."""
    number = mark.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that broke, since the terminal belongs to the run."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    live: LivePage
    timeout = 10

    def do_GET(self) -> None:
        """Answer with the page or its data; 403 without the token or with another Host, 404 for any other path."""
        path, _, query = self.path.partition("?")
        token, slash, name = path.removeprefix("/").partition("/")
        if not self.live.admits(self.headers.get("Host"), token):
            self._answer(403, "text/plain", b"The address of this page has a token; copy all of it.\n")
        elif name == "data":
            mark = parse_qs(query).get("mark", [""])[0]
            self._answer(200, "application/json", json.dumps(self.live.data(mark)).encode())
        elif slash and name == "":
            self._page()
        else:
            self._answer(404, "text/plain", b"There is nothing here.\n")

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'"
        text = _PAGE.read_text(encoding="utf-8").replace("{{STYLE}}", STYLE).replace("{{NONCE}}", nonce)
        more = {"Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'"}
        self._answer(200, "text/html; charset=utf-8", text.encode(), more)

    def _answer(self, code: int, kind: str, content: bytes, more: dict[str, str] | None = None) -> None:
        # A page that was closed is no error.
        with contextlib.suppress(OSError):
            self.send_response(code)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            for name, value in (_HEADERS | (more or {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def version_string(self) -> str:
        """The name that answers give of the server."""
        return "deltatune"

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: the terminal belongs to the run."""


def trains(folder: Path) -> bool:
    """Tell whether another process on this machine trains in `folder`, by the lock that it holds."""
    # The lock is not tried: whoever tries it could hold it when a run wants it.
    try:
        holder = json.loads((folder / "state" / "lock").read_text(encoding="utf-8"))
        process, machine = int(holder["process"]), holder["machine"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if machine != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It is there, and another user's.
    return True
