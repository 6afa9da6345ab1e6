#!/usr/bin/env python3
"""Write the repository's own address into pyproject.toml and README.md, for a release.

usage: scripts/addresses.py TAG

GitHub's runners give the address in GITHUB_SERVER_URL and GITHUB_REPOSITORY. Without them the exit code is 2 and
nothing is written, so that no release names a place that does not exist. README's links into the repository become
addresses of TAG, since PyPI shows the page without the files; pictures become addresses of the files themselves. Only
the release job runs this, on a checkout of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]+)?\)")


def address() -> str | None:
    """The repository's address, or None where it is not known."""
    server, name = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
    known = re.fullmatch(r"https://[\w.-]+", server) and re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    return f"{server}/{name}" if known else None


def with_urls(project: str, place: str, tag: str) -> str:
    """The text of pyproject.toml with a table of addresses."""
    table = {
        "Homepage": place,
        "Documentation": f"{place}/blob/{tag}/docs/index.md",
        "Issues": f"{place}/issues",
        "Changelog": f"{place}/blob/{tag}/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in table.items())
    if "[project.urls]" in project or project.count("[project.scripts]\n") != 1:
        raise SystemExit("pyproject.toml: expected no [project.urls] yet, and one [project.scripts].")
    return project.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n")


def with_links(readme: str, place: str, tag: str, root: Path = ROOT) -> str:
    """The text of README.md with links that lead into the repository wherever it is read."""

    def absolute(match: re.Match[str]) -> str:
        kind = "tree" if (root / match[1]).is_dir() else "blob"
        if match[1].endswith(".svg"):
            kind = "raw"
        return f"]({place}/{kind}/{tag}/{match[1]}{match[2] or ''})"

    return LINK.sub(absolute, readme)


def main() -> int:
    """The exit code: 0 where both files were written, else 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag", metavar="TAG")
    tag = parser.parse_args().tag
    place = address()
    if place is None:
        sys.stderr.write(
            "The repository's address is not known: expected GITHUB_SERVER_URL (https://...) and GITHUB_REPOSITORY "
            "(OWNER/NAME). A release without them would name no place for issues, so there is none.\n"
        )
        return 2
    for name, change in (("pyproject.toml", with_urls), ("README.md", with_links)):
        file = ROOT / name
        file.write_text(change(file.read_text(encoding="utf-8"), place, tag), encoding="utf-8")
    print(f"pyproject.toml and README.md name {place}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
