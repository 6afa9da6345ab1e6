"""Says where the self-test's file may be sent: to the address of issues in the package's metadata, if it has one."""

from __future__ import annotations

import importlib.metadata


def destination() -> str:
    """Return the words behind the file's name; the release job writes the address, and other builds have none."""
    try:
        addresses = importlib.metadata.metadata("deltatune").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        addresses = []
    for name, _, address in (entry.partition(", ") for entry in addresses):
        if name == "Issues":
            return f"for {address}: please attach it to a report there"
    return "for the project's issue page: please attach it to a report there"
