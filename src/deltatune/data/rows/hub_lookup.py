"""Looks for a data set on the Hugging Face hub: says so, and does not wait long for a hub that cannot be reached."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from ...errors import reason
from ...options.values import nearest

# Seconds to wait for the hub's first answer.
_PATIENCE = 10.0


@contextlib.contextmanager
def hub_lookup(name: str) -> Iterator[None]:
    """Open the data set `name` inside the `with` block: from the hub if it answers, else from its cache alone.

    The datasets library by itself tries an unreachable hub for half a minute, as often as for a mistyped folder.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not _answers(name)
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


@cache
def _answers(name: str) -> bool:
    """Say that the hub is asked for `name`, once a process, and return whether it answers."""
    import datasets

    folders: list[str] = []
    # A current folder that may not be listed has no name to offer.
    with contextlib.suppress(OSError):
        folders = [entry.name for entry in Path().iterdir() if entry.is_dir()]
    sys.stderr.write(
        f"--data {name}: there is no such folder here{nearest(name, folders)}; asking the Hugging Face hub for a data "
        "set of this name.\n"
    )
    url = f"{datasets.config.HF_ENDPOINT}/api/datasets/{quote(name)}"
    try:
        urlopen(Request(url, method="HEAD"), timeout=_PATIENCE).close()
    except HTTPError:
        # The hub does not know the name, or does not show it to everybody; the datasets library finds out which.
        return True
    except OSError as error:
        if isinstance(error, URLError) and isinstance(error.reason, SSLError):
            return True  # Python may lack certificates that the library has.
        sys.stderr.write(
            f"The hub cannot be reached ({reason(error)}), so only its cache on this machine is searched.\n"
        )
        return False
    return True
